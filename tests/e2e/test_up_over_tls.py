"""`windlass up` with a certificate of an own authority: workers verify it, a renewal needs no restart, no downgrade."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.certificates import Authority, new_authority
from support.command_line import CommandLine
from support.stores import PostgresStores
from support.worker_harness import until
from windlass.model.task import TaskStatus, new_task


@dataclass
class TlsSite:
    windlass: CommandLine
    folder: Path
    authority: Authority
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def issue(self) -> int:
        return self.authority.issue(self.folder / "cert.pem", self.folder / "key.pem")

    def serial(self) -> int:
        context = ssl.create_default_context(cafile=self.folder / "ca.pem")
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            certificate: Any = connection.getpeercert()
            return int(certificate["serialNumber"], 16)


@asynccontextmanager
async def started(windlass: CommandLine, log: Path, *arguments: object) -> AsyncIterator[Any]:
    with log.open("w") as output:
        process = windlass.start(*arguments, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)


@pytest.fixture
async def site(tmp_path: Path, dsn: str) -> AsyncIterator[TlsSite]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site = TlsSite(CommandLine(tmp_path, {"DATABASE_URL": dsn}), tmp_path, new_authority(), port)
    site.authority.write(tmp_path / "ca.pem")
    site.issue()
    (tmp_path / "windlass.toml").write_text(
        f'[api]\nport = {port}\ntls_cert = "{tmp_path}/cert.pem"\ntls_key = "{tmp_path}/key.pem"\n'
        '[fleets.other]\nqueues = ["none"]\nexec = "true"\n'
    )
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with started(site.windlass, tmp_path / "up.log", "up"), httpx.AsyncClient(verify=context) as client:

        async def answers() -> bool:
            try:
                return (await client.get(f"{site.url}/healthz")).status_code == 200
            except httpx.TransportError:
                return False

        await until(answers, "the server answers over TLS")
        yield site


async def serves(site: TlsSite, serial: int) -> bool:
    return await asyncio.to_thread(site.serial) == serial


async def test_workers_verify_the_certificate_and_a_renewal_needs_no_restart(site: TlsSite, dsn: str) -> None:
    token = site.windlass("tokens", "create", "machines", "--role", "worker", "--json").json["token"]
    machine = CommandLine(site.folder / "machine", {"WINDLASS_TOKEN": token})
    machine.folder.mkdir()
    new_authority().write(machine.folder / "other.pem")
    worker = ("worker", "--url", site.url, "--queue", "q", "--exec", "cat", "--log-format", "json")
    trusted = (*worker, "--ca-file", site.folder / "ca.pem")
    async with PostgresStores(dsn) as store:

        async def is_complete(task_id: int) -> bool:
            task = await store.task(task_id)
            return task is not None and task.status is TaskStatus.COMPLETE

        # Without our authority, or with another one, a worker neither sends its token nor begins.
        for number, arguments in enumerate((worker, (*worker, "--ca-file", machine.folder / "other.pem"))):
            log = machine.folder / f"refused-{number}.log"
            async with started(machine, log, *arguments):
                await until(lambda log=log: "certificate" in log.read_text().lower(), "the certificate is refused")
            assert token not in log.read_text()
        assert await store.workers(include_terminated=True) == []

        async with started(machine, machine.folder / "worker.log", *trusted) as process:
            first = await store.enqueue(new_task("q", {"n": 1}))
            await until(lambda: is_complete(first), "a task over TLS")
            renewed = site.issue()
            await until(lambda: serves(site, renewed), "the renewal is used")
            second = await store.enqueue(new_task("q", {"n": 2}))
            await until(lambda: is_complete(second), "a task after the renewal")
            assert process.poll() is None
        found = await store.task(second)
        assert found is not None
        assert json.loads(found.result or "null") is not None


async def test_port_with_tls_answers_no_plain_http_and_no_old_protocol(site: TlsSite) -> None:
    async with httpx.AsyncClient() as plain:
        for path in ("/healthz", "/login?key=wll_" + "0" * 64):
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{site.port}{path}")
    old = ssl.create_default_context(cafile=site.folder / "ca.pem")
    with pytest.warns(DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")

    def shake_hands() -> None:
        with socket.create_connection(("127.0.0.1", site.port), timeout=30) as connection:
            old.wrap_socket(connection, server_hostname="localhost").close()

    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(shake_hands)
