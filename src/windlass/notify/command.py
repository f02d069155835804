"""Sends messages to a command of the operator: JSON on its standard input, exit code 0 means delivered."""

import asyncio
import contextlib
import json
import os
import shlex
import signal

from windlass.model.alert import Message
from windlass.model.errors import NotDelivered
from windlass.notify.message_content import to_plain

TIMEOUT_S = 30.0


class CommandNotifier:
    """`withheld`: environment variables that the command does not get, because they hold secrets of Windlass."""

    name = "command"

    def __init__(self, command: str, withheld: tuple[str, ...] = ()) -> None:
        self._words = shlex.split(command)
        self._withheld = frozenset(withheld)

    async def send(self, message: Message) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in self._withheld}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise NotDelivered(f"{self._words[0]} did not start ({error.strerror})") from None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await process.communicate(json.dumps(to_plain(message)).encode())
        except TimeoutError:
            raise NotDelivered(f"{self._words[0]} did not end within {TIMEOUT_S:g} s") from None
        finally:
            if process.returncode is None:
                # The whole process group, with everything that the command started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode != 0:
            raise NotDelivered(f"{self._words[0]} exited with code {process.returncode}")
