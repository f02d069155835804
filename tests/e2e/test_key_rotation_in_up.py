"""Rotation of a provider's key while `windlass up` rents machines, as docs/operations.md describes it: no hold."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from support.command_line import CommandLine
from support.worker_harness import until
from windlass.store.connection import connected
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http_server import serving
from windlass_emulators.runpod import RunpodEmulator

OLD, NEW = "old-key-1234567890", "new-key-0987654321"
RELOADED = "reloaded configuration"
FLEET = """
[fleets.far]
queues = ["far"]
min_workers = 1
max_workers = 3
poll_interval_s = 0.3
spawn_timeout_s = 3600
"""
HETZNER = (
    'hetzner_endpoint = "{url}/v1"\n[api]\nport = {port}\n' + FLEET + 'provider = "hetzner"\nhandler = "app:work"\n'
)
RUNPOD = (
    'runpod_endpoint = "{url}/v2"\n[api]\nport = {port}\n' + FLEET + 'provider = "runpod"\nexec = "true"\n'
    'auto_start_worker = false\n[fleets.far.runpod]\nimage = "any"\n'
)


class AccountKeys:
    """The keys that an account accepts, and those that were sent, in order."""

    def __init__(self, *valid: str) -> None:
        self.valid = set(valid)
        self.sent: list[str] = []

    def is_valid(self, headers: Headers) -> bool:
        key = headers.get("authorization", "").removeprefix("Bearer ")
        self.sent.append(key)
        return key in self.valid


class HetznerWithKeys(HetznerEmulator):
    def __init__(self, keys: AccountKeys) -> None:
        super().__init__(lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=0, action_s=0, delete_s=0))
        self._keys = keys

    def authenticate(self, headers: Headers) -> None:
        if not self._keys.is_valid(headers):
            raise self.unauthorized(is_missing=False)


class RunpodWithKeys(RunpodEmulator):
    def __init__(self, keys: AccountKeys) -> None:
        super().__init__(lambda: datetime.now(UTC))
        self._keys = keys

    def authenticate(self, headers: Headers) -> None:
        if not self._keys.is_valid(headers):
            raise self.unauthorized(is_missing=False)


@contextmanager
def running(windlass: CommandLine, log: Path) -> Iterator[Any]:
    with log.open("w") as output:
        up = windlass.start("up", stdout=output, stderr=output)
    try:
        yield up
    finally:
        up.kill()
        up.wait(60)


@pytest.mark.parametrize(
    ("make", "machines_of", "settings", "variable"),
    [
        pytest.param(HetznerWithKeys, lambda emulator: emulator.project.servers, HETZNER, "HCLOUD_TOKEN", id="hetzner"),
        pytest.param(RunpodWithKeys, lambda emulator: emulator.account.pods, RUNPOD, "RUNPOD_API_KEY", id="runpod"),
    ],
)
async def test_key_is_rotated_while_machines_run_without_a_hold(
    tmp_path: Path,
    dsn: str,
    make: Callable[[AccountKeys], Any],
    machines_of: Callable[[Any], dict[Any, Any]],
    settings: str,
    variable: str,
) -> None:
    keys, key_file, log = AccountKeys(OLD), tmp_path / "key", tmp_path / "up.log"
    emulator = make(keys)
    key_file.write_text(OLD)
    (tmp_path / "app.py").write_text("def work(task): ...\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn, f"{variable}_FILE": str(key_file)})
    with serving(emulator) as url:
        (tmp_path / "windlass.toml").write_text(f'data_dir = "state"\n{settings.format(url=url, port=port)}')
        with running(windlass, log) as up:
            await until(lambda: len(machines_of(emulator)) == 1, "the first machine")
            (first,) = machines_of(emulator)
            # Steps 1 to 3: a second key, written to the place that the setting is read from, and SIGHUP.
            keys.valid = {OLD, NEW}
            key_file.write_text(NEW)
            up.send_signal(signal.SIGHUP)
            await until(lambda: RELOADED in log.read_text(), "the reload")
            # Step 4: a cycle that had begun may have used the old key. From the next one on it can be deleted.
            await until(lambda: keys.sent[-1] == NEW, "a call with the new key")
            keys.valid, before = {NEW}, len(keys.sent)
            assert windlass("spawn", "far").code == 0
            await until(lambda: len(machines_of(emulator)) == 2, "a machine that the new key rents")
            assert first in machines_of(emulator)
            await until(lambda: len(keys.sent) > before + 5, "further calls")
            assert set(keys.sent[before:]) == {NEW}
            async with connected(dsn, "looking for holds") as connection:
                assert await connection.fetchval("select planner_state #>> '{hold,code}' from windlass.fleets") is None
                held = "select count(*) from windlass.cycles c where c::text like any ('{%OTHER_ACCOUNT%,%DENIED%}')"
                assert await connection.fetchval(held) == 0
                assert await connection.fetchval("select count(*) from windlass.alerts") == 0
            assert up.poll() is None
    assert not any(key in log.read_text() for key in (OLD, NEW))
