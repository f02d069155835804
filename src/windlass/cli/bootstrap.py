"""`windlass bootstrap`: the first-boot script of a cloud machine."""

import sys
from typing import Annotated

import typer

from windlass.cli.options import ConfigFile, command, load
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.machine import MachineRequest
from windlass.model.worker import DEFAULT_FLEET
from windlass.worker.bootstrap import render_user_data

# A machine that boots with these values cannot join, and they say why.
PLACEHOLDER_TOKEN = "PLACEHOLDER-NOT-A-JOIN-TOKEN"  # noqa: S105
PLACEHOLDER_URL = "https://control-plane.invalid"

app = typer.Typer(help="Show the first-boot script of a cloud machine.", no_args_is_help=True)


@app.callback()
def _group() -> None: ...


@app.command()
@command
async def render(
    fleet: Annotated[
        str | None, typer.Option(help="Fleet of the machine (default: the only one).", metavar="NAME")
    ] = None,
    worker_id: Annotated[str | None, typer.Option(help="Worker of the machine.", metavar="ID")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="URL of the control plane (default: from the configuration).", metavar="URL"),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Print the cloud-init document of a machine.

    The join token is a placeholder. A real token is created when a machine is spawned, and works once.
    """
    loaded = load(config, None).config
    fleets = loaded.fleets or {DEFAULT_FLEET: FleetConfig()}
    names = ", ".join(fleets)
    if fleet is None and len(fleets) > 1:
        raise BadInput(f"several fleets are configured ({names}): choose one with --fleet.")
    name = fleet or next(iter(fleets))
    if name not in fleets:
        raise BadInput(f"fleet {name} not found; configured fleets: {names}.")
    settings = fleets[name]
    request = MachineRequest(worker_id or f"{name}-0-0000000000", name, 0, PLACEHOLDER_TOKEN)
    url = url or loaded.machine_url or PLACEHOLDER_URL
    document = render_user_data(settings.bootstrap, request, url, stop_timeout_s=settings.stop_timeout_s)
    sys.stdout.write(document)
    if sys.stdout.isatty():
        placeholders = "the join token" + (" and the URL" if url == PLACEHOLDER_URL else "")
        print(f"\nwindlass: no machine can boot with this document: {placeholders} are placeholders.", file=sys.stderr)
