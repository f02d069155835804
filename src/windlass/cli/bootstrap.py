"""`windlass bootstrap`: what a rented machine is told to do at its first boot."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.common import ConfigFile, command, load
from windlass.model.errors import BadInput

if TYPE_CHECKING:
    from windlass.model.config import Config
    from windlass.model.fleet import FleetConfig

# A machine that was given this cannot join, and whoever reads it sees why.
PLACEHOLDER_TOKEN = "PLACEHOLDER-NOT-A-JOIN-TOKEN"  # noqa: S105
PLACEHOLDER_URL = "https://control-plane.invalid"

app = typer.Typer(help="What a rented machine does at its first boot.", no_args_is_help=True)


@app.callback()
def _group() -> None: ...


@app.command()
@command
async def render(
    fleet: Annotated[
        str | None, typer.Option(help="The fleet it is for (default: the only one there is).", metavar="NAME")
    ] = None,
    worker_id: Annotated[str | None, typer.Option(help="The worker it is for.", metavar="ID")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Where the machine finds the control plane (default: as configured).", metavar="URL"),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Print the cloud-init document that a machine of a fleet would get.

    Its join token is a placeholder: real ones are made when a machine is hired, and are good once.
    """
    from windlass.model.machine import MachineRequest
    from windlass.worker.bootstrap import render_user_data

    loaded = load(config, None).config
    name, settings = _chosen(loaded, fleet)
    request = MachineRequest(worker_id or f"{name}-0-0000000000", name, 0, PLACEHOLDER_TOKEN)
    url = url or loaded.machine_url or PLACEHOLDER_URL
    document = render_user_data(settings.bootstrap, request, url, stop_timeout_s=settings.stop_timeout_s)
    sys.stdout.write(document)
    if sys.stdout.isatty():
        placeholders = "its join token" + (" and its address" if url == PLACEHOLDER_URL else "")
        print(f"\nwindlass: this is for reading; {placeholders} cannot be used by a machine.", file=sys.stderr)


def _chosen(config: "Config", name: str | None) -> "tuple[str, FleetConfig]":
    from windlass.model.fleet import FleetConfig
    from windlass.model.worker import DEFAULT_FLEET

    fleets = config.fleets or {DEFAULT_FLEET: FleetConfig()}
    if name is None and len(fleets) == 1:
        return next(iter(fleets.items()))
    if name is None:
        raise BadInput(f"there are several fleets ({', '.join(fleets)}): choose one with --fleet.")
    if name not in fleets:
        raise BadInput(f"there is no fleet {name!r}: there is {', '.join(fleets)}.")
    return name, fleets[name]
