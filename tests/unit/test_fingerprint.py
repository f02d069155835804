"""Fingerprints of fleets: what changes them, what does not, and that they reveal nothing."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from windlass.model.fleet import FleetConfig
from windlass.model.rollout import WorkingVersion, changed_settings
from windlass.wiring import fingerprint as module
from windlass.wiring.fingerprint import FingerprintReader, code_files


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("VERSION = 1\n")
    (tmp_path / "run.sh").write_text("echo 1\n")
    return tmp_path


def local(app: Path, **settings: Any) -> FleetConfig:
    return FleetConfig(**{"handler": "app:work", "chdir": app, **settings})


def fingerprint(fleet: FleetConfig, *, instance_id: str = "db-1", version: str = "1.0") -> str:
    return FingerprintReader("red", instance_id, version).compute(fleet)


def test_same_code_and_settings_have_the_same_fingerprint(app: Path) -> None:
    assert fingerprint(local(app)) == fingerprint(local(app))
    assert len(fingerprint(local(app))) == module.CHARACTERS


@pytest.mark.parametrize("changed", ["app.py", "helper.py", "new.py", "package/inner.py"])
def test_changed_python_file_changes_it(app: Path, changed: str) -> None:
    reader = FingerprintReader("red", "db-1", "1.0")
    before = reader.compute(local(app))
    (app / changed).parent.mkdir(exist_ok=True)
    (app / changed).write_text("CHANGED = True\n")
    assert reader.compute(local(app)) != before


def test_deleted_file_changes_it(app: Path) -> None:
    before = fingerprint(local(app))
    (app / "helper.py").unlink()
    assert fingerprint(local(app)) != before


@pytest.mark.parametrize("path", ["notes.txt", ".git/hook.py", "venv/lib.py", "__pycache__/app.py", "own/pyvenv.cfg"])
def test_other_files_do_not_change_it(app: Path, path: str) -> None:
    before = fingerprint(local(app))
    (app / path).parent.mkdir(exist_ok=True)
    (app / path).write_text("x")
    if path.endswith("pyvenv.cfg"):
        (app / "own" / "site.py").write_text("x")
    assert fingerprint(local(app)) == before


@pytest.mark.parametrize(
    ("settings", "is_other"),
    [
        pytest.param({"concurrency": 2}, True, id="concurrency"),
        pytest.param({"env": {"MODEL": "b"}}, True, id="a value of env"),
        pytest.param({"queues": ("x",)}, True, id="queues"),
        pytest.param({"max_workers": 3}, False, id="limits"),
        pytest.param({"idle_timeout_s": 3}, False, id="timeouts of the control plane"),
        pytest.param({"budget_per_hour": "3"}, False, id="budgets"),
    ],
)
def test_settings_count_if_they_reach_a_worker(app: Path, settings: dict[str, Any], is_other: bool) -> None:
    base = fingerprint(local(app, env={"MODEL": "a"}))
    assert (fingerprint(local(app, **{"env": {"MODEL": "a"}, **settings})) != base) is is_other


@pytest.mark.parametrize(
    ("settings", "is_other"),
    [
        ({"bootstrap": {"requirements": ["app==2"]}}, True),
        ({"bootstrap": {"requirements": ["app==1"], "setup": ["true"]}}, True),
        ({"hetzner": {"image": "debian-13"}}, True),
        ({"hetzner": {"choices": ["cx33@nbg1"]}}, False),
    ],
)
def test_rented_machines_count_what_is_installed(settings: dict[str, Any], is_other: bool) -> None:
    base = {"provider": "hetzner", "handler": "app:work", "bootstrap": {"requirements": ["app==1"]}}
    assert (fingerprint(FleetConfig(**{**base, **settings})) != fingerprint(FleetConfig(**base))) is is_other


def test_image_and_env_of_a_pod_count() -> None:
    def pod(**settings: Any) -> str:
        return fingerprint(FleetConfig(provider="runpod", handler="a:b", runpod={"image": "x:1", **settings}))

    assert len({pod(), pod(image="x:2"), pod(env={"A": "1"}), pod(env={"A": "2"}), pod(args="-v")}) == 5


def test_version_of_windlass_counts(app: Path) -> None:
    assert fingerprint(local(app), version="1.1") != fingerprint(local(app))


def test_secret_value_cannot_be_looked_up_across_databases(app: Path) -> None:
    secret = local(app, env={"KEY": "hunter2"})
    assert fingerprint(secret, instance_id="db-2") != fingerprint(secret)


def test_command_counts_the_files_it_names(app: Path) -> None:
    fleet = FleetConfig(exec="sh run.sh --fast", chdir=app)
    assert app / "run.sh" in code_files(fleet, app)
    before = fingerprint(fleet)
    (app / "run.sh").write_text("echo 2\n")
    assert fingerprint(fleet) != before


def test_large_folder_counts_the_own_module_only(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 5)
    for number in range(9):
        (app / f"other_{number}.py").write_text("")
    assert code_files(local(app), app) == [app / "app.py"]


def test_unchanged_file_is_not_read_again(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FingerprintReader("red", "db-1", "1.0")
    before = reader.compute(local(app))
    opened: list[Path] = []
    monkeypatch.setattr(Path, "open", lambda path, *_: opened.append(path))
    assert reader.compute(local(app)) == before
    assert opened == []


async def test_unreadable_files_keep_the_last_version(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FingerprintReader("red", "db-1", "1.0")
    assert (before := await reader.read(local(app))) is not None

    def refuse(*_: Any) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(os, "walk", refuse)
    assert await reader.read(local(app)) == before


async def test_read_that_hangs_is_not_started_again(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, disk, reads = FingerprintReader("red", "db-1", "1.0"), threading.Event(), list[FleetConfig]()

    class SlowDiskReader(FingerprintReader):
        def compute(self, fleet: FleetConfig) -> str:
            reads.append(fleet)
            disk.wait(60)
            return super().compute(fleet)

    slow = SlowDiskReader("red", "db-1", "1.0")
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.01)
    former, fleet = local(app), local(app, concurrency=2)
    try:
        assert [await slow.read(former) for _ in range(5)] == [None] * 5
        assert await slow.read(fleet) is None
    finally:
        disk.set()
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 60)
    assert await slow.read(fleet) == reader.compute(fleet), "the version of the former settings is not taken for it"
    assert reads == [former, fleet]


async def test_late_result_is_taken_by_the_next_read(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, reads = threading.Event(), list[int]()
    files = module.code_files

    def slow_files(*of: Any) -> list[Path]:
        reads.append(1)
        disk.wait(60)
        return files(*of)

    monkeypatch.setattr(module, "code_files", slow_files)
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.01)
    reader = FingerprintReader("red", "db-1", "1.0")
    try:
        assert await reader.read(local(app)) is None
    finally:
        disk.set()
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 60)
    assert await reader.read(local(app)) == fingerprint(local(app))
    assert len(reads) == 2, "one by the reader, one by this test"


def test_deleted_files_are_forgotten(app: Path) -> None:
    reader = FingerprintReader("red", "db-1", "1.0")
    for number in range(3):
        extra = app / f"generated_{number}.py"
        extra.write_text("x = 1\n")
        reader.compute(local(app))
        extra.unlink()
    reader.compute(local(app))
    assert sorted(Path(path).name for path in reader._files) == ["app.py", "helper.py"]


POD = FleetConfig(
    provider="runpod",
    handler="a:b",
    auto_start_worker=True,
    env={"KEY": "k"},
    runpod={"image": "x:1", "env": {"A": "1"}, "ssh": {"checks": ["true"]}},
    bootstrap={"requirements": ["app==1"]},
)
SERVER = FleetConfig(provider="hetzner", handler="a:b", bootstrap={"setup": ["true"]}, hetzner={"image": "debian-12"})


def working_version(reader: FingerprintReader, fleet: FleetConfig) -> WorkingVersion:
    found = reader.compute(fleet)
    text = reader.describe(found)
    assert text is not None
    return WorkingVersion(found, text)


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (POD, {"runpod": POD.runpod.model_copy(update={"image": "x:2"}), "handler": "c:d", "queues": ("z",)}),
        (POD, {"auto_start_worker": True, "bootstrap": POD.bootstrap.model_copy(update={"requirements": ("app==2",)})}),
        (SERVER, {"bootstrap": SERVER.bootstrap.model_copy(update={"setup": ("false",)}), "concurrency": 4}),
        (SERVER.model_copy(update={"chdir": Path("/srv/app-14")}), {"chdir": Path("/srv/app-15")}),
        (SERVER, {"chdir": Path("/srv/app-15")}),
        (SERVER, {"hetzner": SERVER.hetzner.model_copy(update={"image": "debian-13"})}),
    ],
)
def test_settings_of_a_rented_fleet_are_restored(before: FleetConfig, change: dict[str, Any]) -> None:
    reader = FingerprintReader("red", "db-1", "1.0")
    working = working_version(reader, before)
    now = before.model_copy(update={**change, "max_workers": 17})
    assert reader.compute(now) != working.fingerprint
    former = reader.restore(now, working)
    assert former == before.model_copy(update={"max_workers": 17})
    assert "KEY" not in working.settings


@pytest.mark.parametrize(
    ("change", "version"),
    [
        pytest.param({"env": {"KEY": "other"}}, "1.0", id="env differs"),
        pytest.param({"provider": "hetzner"}, "1.0", id="provider differs"),
        pytest.param({"handler": "c:d"}, "1.1", id="Windlass differs"),
    ],
)
def test_version_is_restored_exactly_or_not_at_all(change: dict[str, Any], version: str) -> None:
    working = working_version(FingerprintReader("red", "db-1", "1.0"), POD)
    assert FingerprintReader("red", "db-1", version).restore(POD.model_copy(update=change), working) is None


def test_masked_settings_are_not_restored() -> None:
    reader = FingerprintReader("red", "db-1", "1.0")
    working = working_version(reader, POD)
    masked = WorkingVersion(working.fingerprint, working.settings.replace("app==1", "********"))
    assert reader.restore(POD, masked) is None


def test_code_of_this_host_is_not_restored(app: Path) -> None:
    reader = FingerprintReader("red", "db-1", "1.0")
    working = working_version(reader, local(app))
    (app / "app.py").write_text("CHANGED = True\n")
    after = working_version(reader, local(app))
    assert changed_settings(working.settings, after.settings) == ("code",)
    assert reader.restore(local(app), working) is None
