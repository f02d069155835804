"""Checks before the start that local workers can import their handlers."""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass

from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.wiring.providers import withheld_from
from windlass.worker.handler_check import NOT_FOUND

# A slower import is not judged here: a worker waits longer, and reports the error itself.
CHECK_TIMEOUT_S = 10.0
MAX_ERROR_BYTES = 4_000


@dataclass(frozen=True, slots=True)
class HandlerCheck:
    is_importable: bool
    # The message of `windlass worker`. None if nothing is wrong, or if that is unknown.
    problem: str | None = None


async def check_handlers(config: Config) -> None:
    """Raise ConfigError, with the message of `windlass worker`, if a local fleet cannot import its handler."""
    for name, check in (await handler_checks(config)).items():
        if check.problem is not None:
            raise ConfigError(f"fleet {name}: {check.problem}")


async def handler_checks(config: Config) -> dict[str, HandlerCheck]:
    """By name, each local fleet with a handler. Other fleets import it on their machines."""
    checked = {name: fleet for name, fleet in config.fleets.items() if fleet.provider == "local" and fleet.handler}
    found = await asyncio.gather(*(_check_handler(fleet) for fleet in checked.values()))
    return dict(zip(checked, found, strict=True))


async def _check_handler(fleet: FleetConfig) -> HandlerCheck:
    """Import it in the same folder and environment as LocalProvider uses."""
    withheld = withheld_from(fleet)
    environment = {name: value for name, value in os.environ.items() if name not in withheld}
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "windlass.worker.handler_check", fleet.handler or ""),
            *(("inline",) if fleet.is_inline else ()),
            cwd=fleet.chdir,
            env={**environment, **fleet.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return HandlerCheck(is_importable=False)  # the provider reports why a worker cannot start
    if process.stdout is None:
        raise AssertionError("standard output is a pipe")
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            code = await process.wait()
            message = await process.stdout.read(MAX_ERROR_BYTES) if code == NOT_FOUND else b""
    except TimeoutError:
        return HandlerCheck(is_importable=False)
    finally:
        # The whole process group, with everything that the module started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return HandlerCheck(code == 0, message.decode(errors="replace") or None)
