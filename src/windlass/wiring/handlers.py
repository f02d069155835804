"""Whether the workers of this host could run what they are to run: asked before the first of them is started."""

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.wiring.providers import withheld_from
from windlass.worker.check_handler import NOT_FOUND

if TYPE_CHECKING:
    from windlass.model.fleet import FleetConfig

# An import that takes longer may still succeed: a worker has more patience, and says itself what went wrong.
CHECK_TIMEOUT_S = 10.0
MAX_SENTENCE_BYTES = 4_000


async def check_handlers(config: Config) -> None:
    """Raise ConfigError, in the words of `windlass worker`, if a fleet of this host cannot import its handler."""
    checked = {name: fleet for name, fleet in config.fleets.items() if fleet.provider == "local" and fleet.handler}
    problems = await asyncio.gather(*(_problem_of(fleet) for fleet in checked.values()))
    for name, problem in zip(checked, problems, strict=True):
        if problem is not None:
            raise ConfigError(f"fleet {name}: {problem}")


async def _problem_of(fleet: "FleetConfig") -> str | None:
    # As its workers: LocalProvider starts them in this folder, with this environment.
    withheld = withheld_from(fleet)
    environment = {name: value for name, value in os.environ.items() if name not in withheld}
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "windlass.worker.check_handler", fleet.handler or ""),
            *(("inline",) if fleet.is_inline else ()),
            cwd=fleet.chdir,
            env={**environment, **fleet.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None  # nor can a worker be started: its provider says why
    if process.stdout is None:
        raise AssertionError("its standard output is a pipe")
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            code = await process.wait()
            said = await process.stdout.read(MAX_SENTENCE_BYTES) if code == NOT_FOUND else b""
    except TimeoutError:
        return None
    finally:
        # With all that the module has started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return said.decode(errors="replace") or None
