"""`windlass emulate`: a cloud on loopback, to rehearse with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.common import command
from windlass.model.errors import BadInput

if TYPE_CHECKING:
    import socket
    from datetime import datetime

    from windlass.emulate.exchange import Emulator

app = typer.Typer(help="Run a cloud on this host, to rehearse with: its API, its bill, its faults, real workers.")

DEFAULT_HETZNER_PORT = 8190


@app.callback()
def _group() -> None: ...


@app.command()
@command
async def hetzner(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = DEFAULT_HETZNER_PORT,
    boot_s: Annotated[float, typer.Option(min=0, help="From the request for a server to `running`.")] = 8.0,
    cloud_init_s: Annotated[float, typer.Option(min=0, help="From there to the start of its worker.")] = 0.0,
    hour_s: Annotated[float, typer.Option(min=1, help="How many seconds are billed as an hour.")] = 3600.0,
    server_limit: Annotated[int, typer.Option(min=0, help="Servers the project may have.")] = 100,
    requests_per_hour: Annotated[int, typer.Option(min=1, help="Requests it may make.")] = 3600,
    token: Annotated[str | None, typer.Option(help="Accept only this token (default: any).")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep the machines' disks and logs here (default: a temporary folder).")
    ] = None,
    is_virtual: Annotated[bool, typer.Option("--no-workers", help="Servers start nothing.")] = False,
) -> None:
    """Serve the Hetzner Cloud API on 127.0.0.1. Servers that boot start a real worker from their user_data."""
    from windlass.emulate.hetzner import HetznerEmulator, Settings
    from windlass.emulate.machines import VirtualHost
    from windlass.emulate.process_host import ProcessHost

    settings = Settings(
        boot_s=boot_s,
        cloud_init_s=cloud_init_s,
        billing_hour_s=hour_s,
        server_limit=server_limit,
        requests_per_hour=requests_per_hour,
        token=token,
    )
    listener = _listen(port)
    if is_virtual:
        await _serve(HetznerEmulator(_now, settings, VirtualHost()), listener, "nothing runs in its servers")
        return
    try:
        host = ProcessHost(folder and folder.absolute())
    except OSError as error:
        raise BadInput(
            f"cannot use {folder} for machines ({error.strerror}); name another folder with --dir."
        ) from error
    with host:
        await _serve(HetznerEmulator(_now, settings, host), listener, f"its machines live in {host.folder}")


def _now() -> "datetime":
    from datetime import UTC, datetime

    return datetime.now(UTC)


def _listen(port: int) -> "socket.socket":
    from windlass.emulate.serve import listen

    try:
        return listen(port)
    except OSError as error:
        raise BadInput(f"cannot listen on port {port} ({error.strerror}); choose another with --port.") from error


async def _serve(emulator: "Emulator", listener: "socket.socket", remark: str) -> None:
    import asyncio

    from windlass.emulate.serve import serving

    with serving(emulator, listener) as address:
        print(f"Hetzner Cloud, emulated: {address}/v1 ({remark}).")
        print(f"Faults, bill, machines: {address}/_emulator/ (see docs/emulators.md). Ctrl-C ends it all.", flush=True)
        # Until a signal ends the command, as it ends every command.
        await asyncio.Event().wait()
