"""Joins a control plane: exchanges the join token of a new machine for a worker token and gets its work order.

The machine generates its worker token and saves it before the first call. After a lost answer, a crash or a restart it
repeats the call with the same two tokens, which is accepted. After success the join token is removed from its file. A
restarted service finds its worker token and reads the work order with it.
"""

import contextlib
import json
import os
import secrets
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog

from windlass.model.auth import JOIN_PREFIX, WORKER_PREFIX, is_token, new_token
from windlass.model.errors import BadInput, ControlPlaneUnavailable, TokenRefused
from windlass.model.urls import problem_of_control_plane_url
from windlass.model.work_order import WorkOrder
from windlass.ports import http
from windlass.retry import retrying
from windlass.worker.http_transport import (
    WORK_ORDER,
    ControlPlaneClient,
    HttpTransport,
    WorkerCredentials,
    encode_call,
    parse_answer,
    tls_context,
)

# After this time the control plane has replaced the machine: a late one is kept until its billing hour ends.
JOIN_TIMEOUT_S = 3600.0
# Far more than any join file needs.
MAX_FILE_BYTES = 64 * 1024
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JoinFile:
    """The join file of a machine. `join_token` is None once it has been used."""

    path: Path
    worker_id: str
    url: str
    join_token: str | None = field(repr=False)
    # The authority that signed the control plane's certificate, if it is not publicly trusted: a file, or its content.
    ca_file: Path | None = None
    ca_pem: str | None = None

    def tls(self) -> ssl.SSLContext | bool:
        if self.ca_pem is None or not self.url.startswith("https:"):
            return tls_context(self.url, self.ca_file)
        try:
            return ssl.create_default_context(cadata=self.ca_pem)
        except ssl.SSLError as error:
            raise BadInput(f"cannot read the certificates of ca_pem in the join file {self.path}: {error}.") from None

    @property
    def token_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.token")


def read_join_file(path: Path) -> JoinFile:
    """Raises BadInput. No message contains a token."""
    content = _read_json(path)
    for name in ("worker_id", "url"):
        if not isinstance(content.get(name), str) or not content[name]:
            raise BadInput(f"the join file {path} has no {name}. It needs worker_id, url and join_token.")
    url = content["url"].rstrip("/")
    problem = problem_of_control_plane_url(url)
    if problem is not None:
        raise BadInput(f"the url in the join file {path} {problem}.")
    join_token = content.get("join_token") or None
    if join_token is not None and not (isinstance(join_token, str) and is_token(join_token, JOIN_PREFIX)):
        raise BadInput(f"the join_token in the join file {path} is invalid: join tokens begin with {JOIN_PREFIX}.")
    ca_file, ca_pem = content.get("ca_file"), content.get("ca_pem")
    if ca_pem is not None and not (isinstance(ca_pem, str) and ca_pem.isascii() and "BEGIN CERTIFICATE" in ca_pem):
        raise BadInput(f"ca_pem in the join file {path} is no PEM certificate.")
    return JoinFile(path, content["worker_id"], url, join_token, path.parent / ca_file if ca_file else None, ca_pem)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            content = json.loads(stream.read(MAX_FILE_BYTES))
    except OSError as error:
        raise BadInput(f"cannot read the join file {path}: {error.strerror}. Check --join.") from None
    except ValueError as error:
        raise BadInput(f"the join file {path} is not JSON ({type(error).__name__}). Write it again.") from None
    if not isinstance(content, dict):
        raise BadInput(f"the join file {path} is not a JSON object. It needs worker_id, url and join_token.")
    return content


async def join(path: Path) -> tuple[WorkerCredentials, ssl.SSLContext | bool, WorkOrder]:
    """Raises TokenRefused, or ControlPlaneUnavailable if no answer came within JOIN_TIMEOUT_S."""
    file = read_join_file(path)
    token = _worker_token(file)
    tls = file.tls()
    credentials = WorkerCredentials(file.worker_id, file.url, token)
    join_token = file.join_token
    try:
        order = await retrying(
            lambda: (
                _activate(file, join_token, token, tls)
                if join_token is not None
                else _read_work_order(credentials, tls)
            ),
            "join fleet failed",
            retry_on=ControlPlaneUnavailable,
            timeout_s=JOIN_TIMEOUT_S,
        )
    except BadInput as error:
        raise TokenRefused(str(error)) from None  # a retry would be refused as well
    if join_token is not None:
        _remove_join_token(file)
    credentials = replace(credentials, max_payload_bytes=order.max_payload_bytes)
    log.info("joined fleet", worker_id=file.worker_id, url=file.url, fleet=order.fleet, version=order.version)
    return credentials, tls, order


async def _activate(file: JoinFile, join_token: str, token: str, tls: ssl.SSLContext | bool) -> WorkOrder:
    doing = f"joining as {file.worker_id}"
    plane = ControlPlaneClient(file.url, join_token, tls)
    try:
        body = encode_call(doing, http.ActivateCall(token))
        path = http.ACTIVATE.format(worker_id=quote(file.worker_id, safe=""))
        return parse_answer(doing, WORK_ORDER, await plane.call(doing, "POST", path, body))
    finally:
        await plane.close()


async def _read_work_order(credentials: WorkerCredentials, tls: ssl.SSLContext | bool) -> WorkOrder:
    async with HttpTransport(credentials, tls) as transport:
        return await transport.order()


def _worker_token(file: JoinFile) -> str:
    """The saved worker token, or a new one, which is saved before it is first used."""
    try:
        token = file.token_path.read_text().strip()
    except FileNotFoundError:
        token = ""
    except OSError as error:
        raise BadInput(f"cannot read the token file {file.token_path}: {error.strerror}.") from None
    if is_token(token, WORKER_PREFIX):
        return token
    if file.join_token is None:
        raise BadInput(f"cannot join: {file.path} has no join_token and {file.token_path} has no token.")
    token = new_token(WORKER_PREFIX, secrets.SystemRandom())
    try:
        _write_atomically(file.token_path, token)
    except OSError as error:
        raise BadInput(
            f"cannot write the token to {file.token_path}: {error.strerror}. Let the worker write to that folder."
        ) from None
    return token


def _remove_join_token(file: JoinFile) -> None:
    """A used join token is worthless, so a file that cannot be written is no error."""
    content = _read_json(file.path)
    content.pop("join_token", None)
    try:
        _write_atomically(file.path, json.dumps(content))
    except OSError as error:
        log.info("remove join token failed", path=str(file.path), error=error.strerror)


def _write_atomically(path: Path, text: str) -> None:
    """Write the file with mode 0600, completely or not at all."""
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
