"""A shell on a pod over SSH.

The host key of the first connection is accepted and stored, since pods are minutes old and no authority signs their
keys. After that only the same key is accepted, whatever the port. Only our key is offered: no agent, no password, and
no SSH settings or known hosts of the user who runs the orchestrator.
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
# After three keepalives without a response the connection counts as broken.
KEEPALIVE_S = 10.0
# Only the end of a longer output is kept.
MAX_OUTPUT = 64 * 1024


class Unreachable(Exception):
    """The connection failed or broke. A later attempt may succeed."""


class HostKeyChanged(Exception):
    """Another host responds at this address."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    user: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`status` is None if the command did not end in time."""

    status: int | None
    output: str


class Shell(Protocol):
    # A line of known_hosts without the host.
    host_key: str

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Raises Unreachable."""


# Takes the address and the expected host key (None: any). Raises Unreachable or HostKeyChanged.
OpenShell = Callable[[Endpoint, str | None], AbstractAsyncContextManager[Shell]]


@dataclass(frozen=True, slots=True)
class Identity:
    """Our key pair."""

    key: asyncssh.SSHKey

    @property
    def public_key(self) -> str:
        """A line of authorized_keys."""
        return self.key.export_public_key().decode().strip()

    @asynccontextmanager
    async def open_shell(self, endpoint: Endpoint, host_key: str | None) -> AsyncIterator[Shell]:
        # Accepted keys, certificate authorities, revoked keys. None accepts any key.
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
            raise HostKeyChanged(f"{endpoint} presents another host key than before") from error
        except (OSError, asyncssh.Error) as error:
            raise Unreachable(f"{endpoint}: {_message(error)}") from error
        try:
            yield _AsyncsshShell(connection)
        finally:
            # Without waiting: a deleted pod does not close the connection.
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
                # Not the process as a context manager: that would wait for a command that does not end.
                with contextlib.closing(process):
                    while text := await process.stdout.read(MAX_OUTPUT):
                        output = (output + text)[-MAX_OUTPUT:]
                    await process.wait_closed()
                    status = process.exit_status
        except TimeoutError:
            return CommandResult(None, output)
        except (OSError, asyncssh.Error) as error:
            raise Unreachable(_message(error)) from error
        if status is None:
            raise Unreachable("the connection broke while a command ran")
        return CommandResult(status, output)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    message = " ".join(str(error).split())[:200]
    return message or ("connection timed out" if isinstance(error, TimeoutError) else type(error).__name__)


def read_identity(file: Path) -> Identity:
    """Raises ConfigError. Its message never contains the key."""
    try:
        return Identity(asyncssh.read_private_key(file.expanduser()))
    except OSError as error:
        raise ConfigError(f"cannot read SSH key {file} ({error.strerror}): check runpod_ssh_key_file.") from None
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError, RuntimeError):
        raise ConfigError(
            f"{file} is not a private key without a passphrase. Create one with `ssh-keygen -t ed25519 -N ''`."
        ) from None
