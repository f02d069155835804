"""`windlass emulate`: a cloud on loopback, to rehearse with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from windlass.cli.common import command
from windlass.model.errors import BadInput

if TYPE_CHECKING:
    import socket
    from datetime import datetime

    from windlass_emulators.http import Emulator
    from windlass_emulators.processes import Processes

Host = TypeVar("Host", bound="Processes")
app = typer.Typer(help="Run a cloud on this host, to rehearse with: its API, its bill, its faults, real workers.")

DEFAULT_HETZNER_PORT, DEFAULT_RUNPOD_PORT = 8190, 8191


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
    from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
    from windlass_emulators.machines import VirtualHost
    from windlass_emulators.process_host import ProcessHost

    settings = HetznerEmulatorSettings(
        boot_s=boot_s,
        cloud_init_s=cloud_init_s,
        billing_hour_s=hour_s,
        server_limit=server_limit,
        requests_per_hour=requests_per_hour,
        token=token,
    )
    what, listener = "Hetzner Cloud", _listen(port)
    if is_virtual:
        await _serve(
            what, "/v1", HetznerEmulator(_now, settings, VirtualHost()), listener, "nothing runs in its servers"
        )
        return
    with _housed(ProcessHost, folder) as host:
        remark = f"its machines live in {host.folder}"
        await _serve(what, "/v1", HetznerEmulator(_now, settings, host), listener, remark)


@app.command()
@command
async def runpod(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = DEFAULT_RUNPOD_PORT,
    provisioning_s: Annotated[float, typer.Option(min=0, help="From the request for a pod to `STARTING`.")] = 2.0,
    starting_s: Annotated[float, typer.Option(min=0, help="From there to `RUNNING`.")] = 6.0,
    runtime_s: Annotated[float, typer.Option(min=0, help="From there to its ports.")] = 1.0,
    requests_per_minute: Annotated[int, typer.Option(min=1, help="Requests the account may make.")] = 60,
    key: Annotated[str | None, typer.Option(help="Accept only this API key (default: any).")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep the pods' disks and logs here (default: a temporary folder).")
    ] = None,
    is_virtual: Annotated[bool, typer.Option("--no-workers", help="Pods start nothing.")] = False,
) -> None:
    """Serve Runpod's REST API v2 on 127.0.0.1. Pods that run start a real worker, or an SSH server to start one by."""
    from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
    from windlass_emulators.runpod.containers import VirtualPodHost
    from windlass_emulators.runpod.pod_host import RealPodHost, find_sshd

    settings = RunpodEmulatorSettings(
        provisioning_s=provisioning_s,
        starting_s=starting_s,
        runtime_s=runtime_s,
        requests_per_minute=requests_per_minute,
        # In the same proportion as published.
        requests_per_hour=requests_per_minute * 50,
        requests_per_day=requests_per_minute * 50_000 // 60,
        key=key,
    )
    listener = _listen(port)
    if is_virtual:
        emulator = RunpodEmulator(_now, settings, VirtualPodHost())
        await _serve("Runpod", "/v2", emulator, listener, "nothing runs in its pods")
        return
    with _housed(RealPodHost, folder) as host:
        remark = f"its pods live in {host.folder}"
        if find_sshd() is None:
            remark += "; without SSH, as this host has no sshd: install openssh-server"
        await _serve("Runpod", "/v2", RunpodEmulator(_now, settings, host), listener, remark)


def _housed(kind: "type[Host]", folder: Path | None) -> "Host":
    try:
        return kind(folder and folder.absolute())
    except OSError as error:
        raise BadInput(
            f"cannot use {folder} for machines ({error.strerror}); name another folder with --dir."
        ) from error


def _now() -> "datetime":
    from datetime import UTC, datetime

    return datetime.now(UTC)


def _listen(port: int) -> "socket.socket":
    from windlass_emulators.serve import listen

    try:
        return listen(port)
    except OSError as error:
        raise BadInput(f"cannot listen on port {port} ({error.strerror}); choose another with --port.") from error


async def _serve(what: str, base: str, emulator: "Emulator", listener: "socket.socket", remark: str) -> None:
    import asyncio

    from windlass_emulators.serve import serving

    with serving(emulator, listener) as address:
        print(f"{what}, emulated: {address}{base} ({remark}).")
        print(f"Faults, bill, machines: {address}/_emulator/ (see docs/emulators.md). Ctrl-C ends it all.", flush=True)
        # Until a signal ends the command, as it ends every command.
        await asyncio.Event().wait()
