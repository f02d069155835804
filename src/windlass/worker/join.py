"""How a machine becomes a worker: it exchanges the join token it was made with for its own, and gets its order.

The machine makes up its own token and writes it down before it asks, so a lost answer, a crash or a restart costs
nothing: it asks again with the same two tokens, which is accepted. Once that has worked, the join token is taken out of
its file. A service that is restarted finds its own token there and asks for its order with it.
"""

import asyncio
import contextlib
import json
import os
import random
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog

from windlass.model.auth import JOIN_PREFIX, WORKER_PREFIX, is_token, new_token
from windlass.model.errors import BadInput, ControlPlaneUnavailable, TokenRefused
from windlass.model.urls import problem_of_control_plane_url
from windlass.model.work_order import WorkOrder
from windlass.policy.backoff import reconnect_delay_s
from windlass.ports import http
from windlass.worker.http_transport import (
    ORDER,
    ControlPlane,
    HttpTransport,
    WorkerCredentials,
    read_answer,
    tls_context,
    write,
)

# A control plane that is away for longer than this has given up on us before.
JOIN_TIMEOUT_S = 900.0
# No join file of ours is larger.
MAX_FILE_BYTES = 64 * 1024
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JoinFile:
    """What a machine is made with. `join_token` is None once it has been used."""

    path: Path
    worker_id: str
    url: str
    join_token: str | None = field(repr=False)
    ca_file: Path | None = None

    @property
    def token_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.token")


def read_join_file(path: Path) -> JoinFile:
    """Raises BadInput with what is wrong; no message repeats a token."""
    content = _read_json(path)
    for name in ("worker_id", "url"):
        if not isinstance(content.get(name), str) or not content[name]:
            raise BadInput(f"the join file {path} has no {name}: it needs worker_id, url and join_token.")
    url = content["url"].rstrip("/")
    problem = problem_of_control_plane_url(url)
    if problem is not None:
        raise BadInput(f"the url in the join file {path} {problem}.")
    join_token = content.get("join_token") or None
    if join_token is not None and not (isinstance(join_token, str) and is_token(join_token, JOIN_PREFIX)):
        raise BadInput(f"the join_token in the join file {path} is not one: it begins with {JOIN_PREFIX}.")
    ca_file = content.get("ca_file")
    return JoinFile(path, content["worker_id"], url, join_token, path.parent / ca_file if ca_file else None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            content = json.loads(stream.read(MAX_FILE_BYTES))
    except OSError as error:
        raise BadInput(f"the join file {path} cannot be read ({error.strerror}): check --join.") from None
    except ValueError as error:
        raise BadInput(f"the join file {path} is not JSON ({type(error).__name__}): write it anew.") from None
    if not isinstance(content, dict):
        raise BadInput(f"the join file {path} is not a JSON object: it needs worker_id, url and join_token.")
    return content


async def join(path: Path) -> tuple[WorkerCredentials, ssl.SSLContext | bool, WorkOrder]:
    """Become a worker. Raises TokenRefused if that is not to be, ControlPlaneUnavailable if nobody answers for long."""
    file = read_join_file(path)
    token = _own_token(file)
    tls = tls_context(file.url, file.ca_file)
    credentials = WorkerCredentials(file.worker_id, file.url, token, file.ca_file)
    if file.join_token is not None:
        join_token = file.join_token
        order = await _patiently(lambda: _activate(file, join_token, token, tls))
        _forget_join_token(file)
    else:
        order = await _patiently(lambda: _ask_again(credentials, tls))
    credentials = replace(credentials, max_payload_bytes=order.max_payload_bytes)
    log.info("joined", worker_id=file.worker_id, url=file.url, fleet=order.fleet, version=order.version)
    return credentials, tls, order


async def _activate(file: JoinFile, join_token: str, token: str, tls: ssl.SSLContext | bool) -> WorkOrder:
    doing = f"joining as {file.worker_id}"
    plane = ControlPlane(file.url, join_token, tls)
    try:
        body = write(doing, http.ActivateCall(token))
        path = http.ACTIVATE.format(worker_id=quote(file.worker_id, safe=""))
        return read_answer(doing, ORDER, await plane.call(doing, "POST", path, body))
    finally:
        await plane.close()


async def _ask_again(credentials: WorkerCredentials, tls: ssl.SSLContext | bool) -> WorkOrder:
    async with HttpTransport(credentials, tls) as transport:
        return await transport.order()


async def _patiently(ask: Callable[[], Awaitable[WorkOrder]]) -> WorkOrder:
    give_up_at = time.monotonic() + JOIN_TIMEOUT_S
    failures = 0
    while True:
        try:
            return await ask()
        except ControlPlaneUnavailable as error:
            failures += 1
            if time.monotonic() > give_up_at:
                raise
            log.warning("not joined, trying again", error=str(error), failures=failures)
            await asyncio.sleep(reconnect_delay_s(failures, random.random()))  # noqa: S311
        except BadInput as error:
            # Whatever it has against us, it will have again.
            raise TokenRefused(str(error)) from None


# ------------------------------------------------------------------------------------------------------- its own token


def _own_token(file: JoinFile) -> str:
    """The token made up before, or a new one that is on disk before anybody hears of it."""
    try:
        token = file.token_path.read_text().strip()
    except FileNotFoundError:
        token = ""
    except OSError as error:
        raise BadInput(f"the token in {file.token_path} cannot be read ({error.strerror}).") from None
    if is_token(token, WORKER_PREFIX):
        return token
    if file.join_token is None:
        raise BadInput(f"the join file {file.path} has no join_token and {file.token_path} no token: it cannot join.")
    token = new_token(WORKER_PREFIX, secrets.SystemRandom())
    try:
        _write_whole(file.token_path, token)
    except OSError as error:
        raise BadInput(
            f"the token cannot be written to {file.token_path} ({error.strerror}): let the worker write there."
        ) from None
    return token


def _forget_join_token(file: JoinFile) -> None:
    """It is worth nothing to anybody now. Where the file may not be written, it stays there, worthless."""
    content = _read_json(file.path)
    content.pop("join_token", None)
    try:
        _write_whole(file.path, json.dumps(content))
    except OSError as error:
        log.info("the used join token stays in its file", path=str(file.path), error=error.strerror)


def _write_whole(path: Path, text: str) -> None:
    """All of it or nothing, readable by nobody else."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
