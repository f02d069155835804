"""A shell on a pod, over SSH.

Whoever answers first is believed and remembered: pods are minutes old and nobody vouches for their keys. After that
only the same host key is believed, whatever the port. We show a key and nothing else: no agent, no password, none of
the settings or known hosts of whoever runs this.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import asyncssh

from windlass.model.errors import ConfigError

CONNECT_TIMEOUT_S = 15.0
# A connection over which nothing comes for this long, three times, is dead.
KEEPALIVE_S = 10.0
# Of what a command says, the end is kept.
MAX_OUTPUT = 64 * 1024


class Unreachable(Exception):
    """Nobody let us in, or the connection broke. It may go better later."""


class HostKeyChanged(Exception):
    """Somebody else answers there."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    user: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command said and how it ended; None if it did not, in its time."""

    status: int | None
    output: str


class Shell(Protocol):
    # In the form of a line of known_hosts, without the host.
    host_key: str

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Raises Unreachable."""


# Given where, and the host key that must answer there (None: any), a shell. Raises Unreachable, HostKeyChanged.
OpenShell = Callable[[Endpoint, str | None], AbstractAsyncContextManager[Shell]]


@dataclass(frozen=True, slots=True)
class Identity:
    """Our key."""

    key: asyncssh.SSHKey

    @property
    def public_key(self) -> str:
        """As it stands in authorized_keys."""
        return self.key.export_public_key().decode().strip()

    @asynccontextmanager
    async def open_shell(self, endpoint: Endpoint, host_key: str | None) -> AsyncIterator[Shell]:
        # Keys that are believed, authorities, keys that are not. None: whoever answers.
        known: Any = ([asyncssh.import_public_key(host_key)], [], []) if host_key is not None else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await asyncssh.connect(
                    endpoint.host,
                    endpoint.port,
                    username=endpoint.user,
                    client_keys=[self.key],
                    known_hosts=known,
                    preferred_auth="publickey",
                    agent_path=None,
                    config=None,
                    keepalive_interval=KEEPALIVE_S,
                )
        except asyncssh.HostKeyNotVerifiable as error:
            raise HostKeyChanged(f"{endpoint} shows another host key than before") from error
        except (OSError, asyncssh.Error) as error:
            raise Unreachable(f"{endpoint}: {_words(error)}") from error
        try:
            yield _AsyncsshShell(connection)
        finally:
            # Not waited for: a pod that is gone says no farewell.
            connection.abort()


class _AsyncsshShell:
    def __init__(self, connection: asyncssh.SSHClientConnection) -> None:
        self._connection = connection
        key = connection.get_server_host_key()
        self.host_key = key.export_public_key().decode().strip() if key is not None else ""

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        output = ""
        try:
            async with asyncio.timeout(timeout_s):
                process: asyncssh.SSHClientProcess[str] = await self._connection.create_process(
                    command, stdin=asyncssh.DEVNULL, stderr=asyncssh.STDOUT, errors="replace"
                )
                # Not its own context manager: that would wait for a command that does not end.
                with contextlib.closing(process):
                    while text := await process.stdout.read(MAX_OUTPUT):
                        output = (output + text)[-MAX_OUTPUT:]
                    await process.wait_closed()
                    status = process.exit_status
        except TimeoutError:
            return CommandResult(None, output)
        except (OSError, asyncssh.Error) as error:
            raise Unreachable(_words(error)) from error
        if status is None:
            raise Unreachable("the connection broke while a command ran")
        return CommandResult(status, output)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    said = " ".join(str(error).split())[:200]
    return said or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def read_identity(file: Path) -> Identity:
    """Raises ConfigError, and says nothing of what is in it."""
    try:
        return Identity(asyncssh.read_private_key(file.expanduser()))
    except OSError as error:
        raise ConfigError(f"the SSH key {file} cannot be read ({error.strerror}): check runpod_ssh_key_file.") from None
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError, RuntimeError):
        raise ConfigError(
            f"{file} is no private key that can be used (a key without a passphrase is needed): make one with "
            "`ssh-keygen -t ed25519 -N ''`."
        ) from None
