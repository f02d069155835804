"""Joining a control plane over a real connection: tokens, retries, invalid join files, TLS."""

import asyncio
import json
import shutil
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.control_planes import SECRET, InMemoryControlPlane, open_control_plane
from windlass.model.auth import JOIN_PREFIX, WORKER_PREFIX, is_token
from windlass.model.errors import BadInput, ControlPlaneUnavailable, DatabaseUnavailable, TokenRefused
from windlass.server.server import listen, serving
from windlass.worker import joining as module
from windlass.worker.http_transport import HttpTransport
from windlass.worker.joining import join, read_join_file

PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
JOIN_TOKEN = f"{JOIN_PREFIX}{'1' * 64}"


@pytest.fixture
async def plane(clock: Any) -> AsyncIterator[InMemoryControlPlane]:
    async with open_control_plane(clock) as plane:
        yield plane


@asynccontextmanager
async def served(plane: InMemoryControlPlane, port: int = 0) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", port)
    port = listener.getsockname()[1]
    async with serving(plane.app, listener):
        yield port


def write_join_file(folder: Path, **content: Any) -> Path:
    path = folder / "join.json"
    path.write_text(json.dumps(content))
    return path


async def test_join_saves_worker_token_and_removes_join_token(plane: InMemoryControlPlane, tmp_path: Path) -> None:
    join_token = await plane.spawn_worker()
    async with served(plane) as port:
        url = f"http://127.0.0.1:{port}"
        path = write_join_file(tmp_path, worker_id="w0", url=url + "/", join_token=join_token, note="kept")
        credentials, tls, order = await join(path)
        assert (credentials.worker_id, credentials.url, tls) == ("w0", url, False)
        assert (order.queues, order.env) == (("a", "b"), {"API_KEY": SECRET})
        assert SECRET not in repr(order)
        assert credentials.token not in repr(credentials)
        assert json.loads(path.read_text()) == {"worker_id": "w0", "url": url + "/", "note": "kept"}
        token_file = tmp_path / "join.json.token"
        assert is_token(token_file.read_text(), WORKER_PREFIX)
        for file in (path, token_file):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert set(tmp_path.iterdir()) == {path, token_file}  # noqa: ASYNC240

        # A restart uses the saved token.
        again, _, order_again = await join(path)
        assert (again, order_again) == (credentials, order)


async def test_machine_whose_join_answer_was_lost_joins_again(plane: InMemoryControlPlane, tmp_path: Path) -> None:
    join_token = await plane.spawn_worker()
    async with served(plane) as port:
        path = write_join_file(tmp_path, worker_id="w0", url=f"http://127.0.0.1:{port}", join_token=join_token)
        first, _, _ = await join(path)
        # The machine died before the answer. Its worker token was saved before the first call.
        write_join_file(tmp_path, worker_id="w0", url=f"http://127.0.0.1:{port}", join_token=join_token)
        second, _, _ = await join(path)
        assert second == first


async def test_join_is_retried_while_control_plane_is_unavailable(plane: InMemoryControlPlane, tmp_path: Path) -> None:
    join_token = await plane.spawn_worker()
    async with served(plane) as port:
        pass
    path = write_join_file(tmp_path, worker_id="w0", url=f"http://127.0.0.1:{port}", join_token=join_token)
    joining = asyncio.create_task(join(path))
    while not (tmp_path / "join.json.token").exists():
        await asyncio.sleep(0)
    plane.store.error = DatabaseUnavailable("unavailable")
    async with served(plane, port):
        while not plane.store.refused_logins:
            await asyncio.sleep(0)
        plane.store.error = None
        credentials, _, _ = await asyncio.wait_for(joining, 30)
    assert credentials.worker_id == "w0"


async def test_join_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_TIMEOUT_S", 0.0)
    path = write_join_file(tmp_path, worker_id="w0", url="http://127.0.0.1:1", join_token=JOIN_TOKEN)
    with pytest.raises(ControlPlaneUnavailable, match=r"joining as w0: the control plane at http://127"):
        await join(path)


async def test_join_of_terminated_worker_is_refused_without_retry(plane: InMemoryControlPlane, tmp_path: Path) -> None:
    join_token = await plane.spawn_worker()
    await plane.terminate_worker()
    async with served(plane) as port:
        url = f"http://127.0.0.1:{port}"
        path = write_join_file(tmp_path, worker_id="w0", url=url, join_token=join_token)
        with pytest.raises(TokenRefused, match="worker w0 has terminated"):
            await join(path)
        path = write_join_file(tmp_path, worker_id="w1", url=url, join_token=join_token)
        with pytest.raises(TokenRefused):
            await join(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", "is not JSON", id="no JSON"),
        pytest.param("[]", "is not a JSON object", id="a list"),
        pytest.param("{}", "has no worker_id", id="no worker id"),
        pytest.param('{"worker_id": "w"}', "has no url", id="no url"),
        pytest.param('{"worker_id": "w", "url": "example.com"}', "is not a URL", id="no scheme"),
        pytest.param('{"worker_id": "w", "url": "ftp://example.com"}', "is not a URL", id="another protocol"),
        pytest.param(
            '{"worker_id": "w", "url": "http://example.com"}', "uses http to example.com", id="http to a public name"
        ),
        pytest.param(
            '{"worker_id": "w", "url": "http://8.8.8.8:80"}', "uses http to 8.8.8.8", id="http to a public address"
        ),
        pytest.param('{"worker_id": "w", "url": "https://u:p@h"}', "remove user", id="password in the url"),
        pytest.param(
            '{"worker_id": "w", "url": "http://10.0.0.2", "join_token": "x"}', "begin with wlj_", id="invalid token"
        ),
        pytest.param('{"worker_id": "w", "url": "http://10.0.0.2"}', "cannot join", id="no token"),
        pytest.param(
            json.dumps({"worker_id": "w", "url": "https://h", "join_token": JOIN_TOKEN, "ca_file": "missing"}),
            "cannot read the certificates",
            id="no certificates",
        ),
        pytest.param(
            json.dumps({"worker_id": "w", "url": "https://h", "join_token": JOIN_TOKEN, "ca_pem": "x"}),
            "is no PEM certificate",
            id="no certificate",
        ),
        pytest.param(
            json.dumps({"worker_id": "w", "url": "https://h", "join_token": JOIN_TOKEN, "ca_pem": PEM}),
            "cannot read the certificates of ca_pem",
            id="broken certificate",
        ),
    ],
)
async def test_invalid_join_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "join.json"
    path.write_text(content)
    with pytest.raises(BadInput) as caught:
        await join(path)
    assert message in str(caught.value)
    assert JOIN_TOKEN not in str(caught.value)


def test_missing_join_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read the join file"):
        read_join_file(tmp_path / "missing")


@pytest.mark.parametrize(
    "url", ["https://example.com", "https://example.com:8443/windlass", "http://10.0.0.2:80", "http://[fd00::1]:80"]
)
def test_https_is_allowed_anywhere_and_http_in_private_networks(tmp_path: Path, url: str) -> None:
    path = write_join_file(tmp_path, worker_id="w", url=url, join_token=JOIN_TOKEN)
    assert read_join_file(path).url == url


# --------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key in the same folder."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path.with_suffix(".key")]
    command = ["openssl", "req", "-x509", "-days", "1", *subject, *key, "-out", path]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return path


@asynccontextmanager
async def behind_tls(port: int, certificate: Path) -> AsyncIterator[int]:
    """A TLS proxy, as in front of a control plane on a public address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, inner_writer), forward(inner_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "localhost", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_https_verifies_certificate_of_control_plane(
    plane: InMemoryControlPlane, tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_TIMEOUT_S", 0.0)
    join_token = await plane.spawn_worker()
    async with served(plane) as inner, behind_tls(inner, certificate) as port:
        content = {"worker_id": "w0", "url": f"https://localhost:{port}", "join_token": join_token}
        with pytest.raises(ControlPlaneUnavailable, match="certificate verify failed"):
            await join(write_join_file(tmp_path, **content))
        credentials, tls, order = await join(write_join_file(tmp_path, **content, ca_file=str(certificate)))
        async with HttpTransport(credentials, tls) as transport:
            assert await transport.order() == order
        # Pods have the certificate in the join data.
        pem = await asyncio.to_thread(certificate.read_text)
        _, _, again = await join(write_join_file(tmp_path, **content, ca_pem=pem))
        assert again == order
