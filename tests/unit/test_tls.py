"""TLS of the HTTP server: verification by workers, renewal without a restart, refusals."""

import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from support.certificates import new_authority
from windlass.model.config import ApiConfig, Config
from windlass.model.errors import BadInput, ConfigError
from windlass.server import tls as tls_module
from windlass.server.server import listen, serving
from windlass.server.tls import ReloadingTls, TlsFiles
from windlass.wiring.http_server import open_listener
from windlass.worker.http_client import HttpClient
from windlass.worker.http_transport import tls_context


async def answer(scope: Any, _receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})


async def body_from(url: str, tls: ssl.SSLContext | bool) -> bytes:
    client = HttpClient(url, {}, tls, max_response_bytes=1_000)
    try:
        return (await client.request("GET", "/", None, 30.0)).body
    finally:
        await client.close()


def serial_of(port: int, context: ssl.SSLContext) -> int:
    import socket

    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return int(connection.getpeercert()["serialNumber"], 16)


async def test_worker_verifies_certificate_with_own_authority(tmp_path: Path) -> None:
    authority = new_authority()
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue(files.certificate, files.key)
    listener = listen("127.0.0.1", 0)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(answer, listener, tls=ReloadingTls(files)):
        assert await body_from(url, tls_context(url, authority.write(tmp_path / "ca.pem"))) == b"https"
        with pytest.raises(ssl.SSLCertVerificationError):
            await body_from(url, tls_context(url, new_authority().write(tmp_path / "other.pem")))
        with pytest.raises(ssl.SSLCertVerificationError):
            await body_from(url, tls_context(url, None))


async def test_renewed_certificate_is_used_without_restart(tmp_path: Path) -> None:
    import asyncio

    authority = new_authority()
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    first = authority.issue(files.certificate, files.key)
    tls = ReloadingTls(files)
    context = ssl.create_default_context(cafile=authority.write(tmp_path / "ca.pem"))
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with serving(answer, listener, tls=tls):
        assert await asyncio.to_thread(serial_of, port, context) == first
        # A key that does not belong to the certificate yet: the old pair stays in use.
        authority.issue(tmp_path / "unused.pem", files.key)
        assert not await tls.reload_if_changed()
        assert await asyncio.to_thread(serial_of, port, context) == first
        second = authority.issue(files.certificate, files.key)
        assert await tls.reload_if_changed()
        assert not await tls.reload_if_changed()
        assert await asyncio.to_thread(serial_of, port, context) == second


async def test_context_in_use_changes_on_the_event_loop_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    new_authority().issue(files.certificate, files.key)
    tls = ReloadingTls(files)
    new_authority().issue(files.certificate, files.key)
    loads: list[tuple[bool, bool]] = []
    load_into = TlsFiles.load_into

    def recorded_load(self: TlsFiles, context: ssl.SSLContext) -> None:
        load_into(self, context)
        loads.append((context is tls.context, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(TlsFiles, "load_into", recorded_load)
    monkeypatch.setattr(tls_module, "CHECK_INTERVAL_S", 0.0)
    watch = asyncio.create_task(tls.watch())
    async with asyncio.timeout(30):
        while len(loads) < 2:
            await asyncio.sleep(0.01)
    watch.cancel()
    assert loads == [(False, False), (True, True)]


async def test_unusable_renewal_is_logged_once_per_change(tmp_path: Path) -> None:
    authority = new_authority()
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue(files.certificate, files.key)
    tls = ReloadingTls(files)
    with structlog.testing.capture_logs() as logs:
        for _change in range(2):
            authority.issue(tmp_path / "unused.pem", files.key)
            for _check in range(3):
                await tls.reload_if_changed()
        files.key.unlink()
        for _check in range(3):
            await tls.reload_if_changed()
        authority.issue(files.certificate, files.key)
        assert await tls.reload_if_changed()
    assert [line["event"] for line in logs] == [*["reload certificate failed"] * 3, "reloaded certificate"]


@pytest.mark.parametrize(
    ("certificate", "key"),
    [
        pytest.param("missing.pem", "key.pem", id="missing certificate"),
        pytest.param("cert.pem", "other-key.pem", id="key of another certificate"),
        pytest.param("key.pem", "key.pem", id="no certificate in the file"),
    ],
)
def test_unusable_certificate_is_refused(tmp_path: Path, certificate: str, key: str) -> None:
    authority = new_authority()
    authority.issue(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue(tmp_path / "other.pem", tmp_path / "other-key.pem")
    with pytest.raises(ConfigError, match=r"Check api.tls_cert and api.tls_key"):
        ReloadingTls(TlsFiles(tmp_path / certificate, tmp_path / key))


def test_plain_http_beyond_loopback_is_refused() -> None:
    with pytest.raises(BadInput, match=r"without TLS, which would send tokens unencrypted: set api.tls_cert"):
        open_listener(Config(api=ApiConfig(host="0.0.0.0", port=0)))  # noqa: S104 - it is refused
    listener = open_listener(Config(api=ApiConfig(port=0)))
    assert listener is not None
    listener.close()


def test_addresses_of_a_server_with_tls_use_https(tmp_path: Path) -> None:
    api = ApiConfig(host="10.0.0.2", port=8443, tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    assert Config(api=api).machine_url == "https://10.0.0.2:8443"
    with pytest.raises(ValueError, match="tls_cert and tls_key belong together"):
        ApiConfig(tls_cert=tmp_path / "cert.pem")
