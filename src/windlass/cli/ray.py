"""`windlass ray`: the dispatcher and the nodes of a fleet whose tasks Ray places. `windlass up` starts them."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from windlass import __version__
from windlass.cli.errors import EXIT_LOST
from windlass.cli.logs import LogFormat, configure_logs
from windlass.cli.options import ConfigFile, DataDir, command, load
from windlass.cli.worker_env import SpawnedWorkerEnv
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.ray import RaySettings
from windlass.model.worker import DEFAULT_FLEET
from windlass.ray.node import NodeSettings
from windlass.wiring.ray import run_dispatcher, run_node
from windlass.worker.lifecycle import ExitReason

app = typer.Typer(help="Run the parts of a fleet whose tasks Ray places.", no_args_is_help=True)


@app.command()
@command
async def dispatch(
    fleet: Annotated[str, typer.Option(help="Fleet whose tasks to place.", metavar="NAME")] = DEFAULT_FLEET,
    settings: Annotated[
        str | None, typer.Option(hidden=True, help="Settings of the fleet, as JSON.", metavar="JSON")
    ] = None,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> int:
    """Claim tasks of a fleet and place them on Ray nodes.

    One dispatcher per fleet is active, others are standbys. Needs RAY_ADDRESS, and a Ray node on this host.
    """
    configure_logs(log_format)
    loaded = load(config, data_dir, has_fleets=settings is None)
    # `windlass up` passes the settings. A dispatcher that was started by hand reads the file.
    chosen = loaded.config.fleets.get(fleet) if settings is None else FleetConfig.model_validate_json(settings)
    if chosen is None or chosen.engine != "ray":
        raise BadInput(f'fleet {fleet} with engine = "ray" not found. Check windlass.toml and --fleet.')
    if loaded.config.ray_address is None:
        raise BadInput("no Ray cluster: set RAY_ADDRESS to its head, for example 10.0.0.5:6379, or use `windlass up`.")
    return await run_dispatcher(loaded.config, fleet, chosen, __version__)


@app.command(hidden=True)
@command
async def node(
    address: Annotated[str, typer.Option(help="Address of the Ray head.", metavar="HOST:PORT")],
    settings: Annotated[str, typer.Option(help="Resources of the node, as JSON.", metavar="JSON")] = "{}",
    queue: Annotated[list[str] | None, typer.Option("--queue", "-q")] = None,
    handler: str | None = None,
    exec_: Annotated[str | None, typer.Option("--exec")] = None,
    concurrency: Annotated[int, typer.Option(min=1)] = 1,
    chdir: Path | None = None,
    heartbeat_interval: float = 5.0,
    lease: float = 30.0,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> int:
    """Run a spawned Ray node: join the cluster and send heartbeats. Started by the provider."""
    del handler, exec_  # The dispatcher decides what runs.
    configure_logs(log_format)
    spawned = SpawnedWorkerEnv.take_from_environment()
    if spawned.worker_id is None:
        raise BadInput('the provider starts nodes: set provider = "ray-local" in windlass.toml and run `windlass up`.')
    loaded = load(config, data_dir, has_fleets=False, database_url=spawned.database_url)
    if chdir is not None:
        os.chdir(chdir)
    exit_reason = await run_node(
        loaded.config,
        NodeSettings(
            worker_id=spawned.worker_id,
            fleet=spawned.fleet,
            queues=tuple(queue or ()),
            address=address,
            ray=RaySettings.model_validate(json.loads(settings)),
            concurrency=concurrency,
            heartbeat_interval_s=heartbeat_interval,
            lease_s=lease,
            version=__version__,
        ),
        secret=spawned.secret,
    )
    return EXIT_LOST if exit_reason is ExitReason.LOST else 0
