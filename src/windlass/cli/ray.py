"""`windlass ray`: the parts of a fleet whose tasks Ray places. `windlass up` starts them where they are needed."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from windlass import __version__
from windlass.cli.common import ConfigFile, DataDir, command, load
from windlass.cli.logs import LogFormat, configure_logs
from windlass.cli.worker_env import SpawnedWorkerEnv
from windlass.model.errors import BadInput
from windlass.model.worker import DEFAULT_FLEET

EXIT_LOST = 3
app = typer.Typer(help="Fleets whose tasks are placed by Ray.", no_args_is_help=True)


@app.command()
@command
async def dispatch(
    fleet: Annotated[str, typer.Option(help="Whose tasks to hand to Ray.", metavar="NAME")] = DEFAULT_FLEET,
    settings: Annotated[str | None, typer.Option(hidden=True, help="The fleet's, as JSON.", metavar="JSON")] = None,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> int:
    """Claim a fleet's tasks as far as Ray has room, and let Ray place them.

    One dispatcher of a fleet acts; others stand by until it is gone. Needs RAY_ADDRESS, and a Ray node on this host.
    """
    configure_logs(log_format)
    from windlass.model.fleet import FleetConfig
    from windlass.wiring.ray import run_dispatcher

    loaded = load(config, data_dir, has_fleets=settings is None)
    # `windlass up` says by which it goes; whoever starts one by hand has a file.
    chosen = loaded.config.fleets.get(fleet) if settings is None else FleetConfig.model_validate_json(settings)
    if chosen is None or chosen.engine != "ray":
        raise BadInput(f'there is no fleet {fleet} with engine = "ray": check windlass.toml and --fleet.')
    if loaded.config.ray_address is None:
        raise BadInput("there is no Ray cluster: set RAY_ADDRESS to its head, as 10.0.0.5:6379, or use `windlass up`.")
    return await run_dispatcher(loaded.config, fleet, chosen, __version__)


@app.command(hidden=True)
@command
async def node(
    address: Annotated[str, typer.Option(help="The Ray head to join.", metavar="HOST:PORT")],
    settings: Annotated[str, typer.Option(help="What the node offers, as JSON.", metavar="JSON")] = "{}",
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
    """The program of a hired node: join the cluster, and say that it lives. Started by the provider."""
    del handler, exec_  # whoever places tasks says what is run
    configure_logs(log_format)
    from windlass.model.ray import RaySettings
    from windlass.ray.node import NodeSettings
    from windlass.wiring.ray import run_node
    from windlass.worker.lifecycle import ExitReason

    hiring = SpawnedWorkerEnv.from_environment()
    if hiring.worker_id is None:
        raise BadInput('a node is started by whoever hires it: set provider = "ray-local" in windlass.toml.')
    loaded = load(config, data_dir, has_fleets=False, database_url=hiring.database_url)
    if chdir is not None:
        os.chdir(chdir)
    exit_reason = await run_node(
        loaded.config,
        NodeSettings(
            worker_id=hiring.worker_id,
            fleet=hiring.fleet,
            queues=tuple(queue or ()),
            address=address,
            ray=RaySettings.model_validate(json.loads(settings)),
            concurrency=concurrency,
            heartbeat_interval_s=heartbeat_interval,
            lease_s=lease,
            version=__version__,
        ),
    )
    return EXIT_LOST if exit_reason is ExitReason.LOST else 0
