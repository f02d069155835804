"""`windlass emulate`: an emulated Hetzner Cloud or Runpod on loopback, whose machines are local processes."""

import asyncio
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from windlass.cli.options import command
from windlass.model.errors import BadInput
from windlass_emulators.hetzner import HetznerEmulator, HetznerEmulatorSettings
from windlass_emulators.http import Emulator
from windlass_emulators.http_server import listen, serving
from windlass_emulators.machines import VirtualHost
from windlass_emulators.process_host import ProcessHost
from windlass_emulators.processes import Processes
from windlass_emulators.runpod import RunpodEmulator, RunpodEmulatorSettings
from windlass_emulators.runpod.containers import VirtualPodHost
from windlass_emulators.runpod.images import BARE_IMAGE
from windlass_emulators.runpod.pod_host import RealPodHost, find_sshd

Host = TypeVar("Host", bound=Processes)
app = typer.Typer(help="Run an emulated cloud on this host, with real workers.")
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")]

DEFAULT_HETZNER_PORT, DEFAULT_RUNPOD_PORT = 8190, 8191


@app.command()
@command
async def hetzner(
    port: Port = DEFAULT_HETZNER_PORT,
    boot_s: Annotated[float, typer.Option(min=0, help="Seconds from creation to `running`.")] = 8.0,
    cloud_init_s: Annotated[
        float, typer.Option(min=0, help="Seconds from `running` to the start of the worker.")
    ] = 0.0,
    hour_s: Annotated[float, typer.Option(min=1, help="Seconds in a billed hour.")] = 3600.0,
    server_limit: Annotated[int, typer.Option(min=0, help="Maximum number of servers in the project.")] = 100,
    dedicated_core_limit: Annotated[int, typer.Option(min=0, help="Maximum number of dedicated cores.")] = 128,
    primary_ip_limit: Annotated[int, typer.Option(min=0, help="Maximum number of Primary IPs.")] = 250,
    requests_per_hour: Annotated[int, typer.Option(min=1, help="API rate limit.")] = 3600,
    token: Annotated[str | None, typer.Option(help="Accept only this API token (default: any).")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder for disks and logs of servers (default: a temporary one).")
    ] = None,
    is_virtual: Annotated[bool, typer.Option("--no-workers", help="Servers start no processes.")] = False,
) -> None:
    """Serve the Hetzner Cloud API on 127.0.0.1. A server that boots starts a real worker from its user_data."""
    settings = HetznerEmulatorSettings(
        boot_s=boot_s,
        cloud_init_s=cloud_init_s,
        billing_hour_s=hour_s,
        server_limit=server_limit,
        dedicated_core_limit=dedicated_core_limit,
        primary_ip_limit=primary_ip_limit,
        requests_per_hour=requests_per_hour,
        token=token,
    )
    listener = _listen(port)
    if is_virtual:
        emulator = HetznerEmulator(_now, settings, VirtualHost())
        await _serve("Hetzner Cloud", "/v1", emulator, listener, "servers run no processes")
        return
    with _open_host(ProcessHost, folder) as host:
        emulator = HetznerEmulator(_now, settings, host)
        await _serve("Hetzner Cloud", "/v1", emulator, listener, f"servers in {host.folder}")


@app.command()
@command
async def runpod(
    port: Port = DEFAULT_RUNPOD_PORT,
    provisioning_s: Annotated[float, typer.Option(min=0, help="Seconds from creation to `STARTING`.")] = 2.0,
    starting_s: Annotated[float, typer.Option(min=0, help="Seconds from `STARTING` to `RUNNING`.")] = 6.0,
    runtime_s: Annotated[float, typer.Option(min=0, help="Seconds from `RUNNING` to open ports.")] = 1.0,
    requests_per_minute: Annotated[int, typer.Option(min=1, help="API rate limit.")] = 60,
    key: Annotated[str | None, typer.Option(help="Accept only this API key (default: any).")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder for disks and logs of pods (default: a temporary one).")
    ] = None,
    is_virtual: Annotated[bool, typer.Option("--no-workers", help="Pods start no processes.")] = False,
    bare_images: Annotated[
        list[str] | None,
        typer.Option("--bare-image", help="Start of the name of images with Python and SSH, but without Windlass."),
    ] = None,
) -> None:
    """Serve the Runpod REST API v2 on 127.0.0.1. A pod starts a real worker, or an SSH server to start one with."""
    settings = RunpodEmulatorSettings(
        provisioning_s=provisioning_s,
        starting_s=starting_s,
        runtime_s=runtime_s,
        requests_per_minute=requests_per_minute,
        # The same ratio as Runpod's published limits.
        requests_per_hour=requests_per_minute * 50,
        requests_per_day=requests_per_minute * 50_000 // 60,
        key=key,
    )
    listener = _listen(port)
    if is_virtual:
        emulator = RunpodEmulator(_now, settings, VirtualPodHost())
        await _serve("Runpod", "/v2", emulator, listener, "pods run no processes")
        return
    with _open_host(RealPodHost, folder) as host:
        host.images |= dict.fromkeys(bare_images or (), BARE_IMAGE)
        remark = f"pods in {host.folder}"
        if find_sshd() is None:
            remark += "; no SSH: sshd not found, install openssh-server"
        await _serve("Runpod", "/v2", RunpodEmulator(_now, settings, host), listener, remark)


def _open_host(kind: type[Host], folder: Path | None) -> Host:
    try:
        return kind(folder and folder.absolute())
    except OSError as error:
        raise BadInput(
            f"cannot use the folder {folder}: {error.strerror}. Choose another folder with --dir."
        ) from error


def _now() -> datetime:
    return datetime.now(UTC)


def _listen(port: int) -> socket.socket:
    try:
        return listen(port)
    except OSError as error:
        raise BadInput(f"cannot listen on port {port}: {error.strerror}. Choose another port with --port.") from error


async def _serve(vendor: str, base: str, emulator: Emulator, listener: socket.socket, remark: str) -> None:
    """Serve until a signal cancels the command."""
    with serving(emulator, listener) as address:
        print(f"emulated {vendor}: {address}{base} ({remark})")
        print(f"control (faults, bill, machines): {address}/_emulator/, see docs/emulators.md", flush=True)
        await asyncio.Event().wait()
