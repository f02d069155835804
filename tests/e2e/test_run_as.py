"""Handlers of local fleets as another user: `run_as` and `--run-as`."""

import asyncio
import json
import os
import pwd
import sys
from pathlib import Path

import pytest

from support.command_line import CommandLine
from windlass.model.fleet import FleetConfig
from windlass.model.task import Claim
from windlass.worker.command import CommandExecutor
from windlass.worker.executor import AttemptSuccess, Outcome
from windlass.worker.handler_user import find_handler_user
from windlass.worker.isolated import IsolatedExecutor

HANDLER = """
import os
def who(task):
    try:
        with open("/proc/%d/environ" % os.getppid(), "rb") as stream:
            stream.read()
        can_read = True
    except PermissionError:
        can_read = False
    return {"uid": os.geteuid(), "groups": os.getgroups(), "home": os.environ["HOME"], "reads_worker": can_read}
"""


def claim() -> Claim:
    from datetime import UTC, datetime
    from uuid import uuid4

    return Claim(1, uuid4(), "q", "null", 1, 3, 60.0, 0, datetime.now(UTC))


async def run(executor: IsolatedExecutor | CommandExecutor) -> Outcome:
    await executor.start()
    try:
        return await executor.run(claim(), lambda *_: None)
    finally:
        await executor.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a handler that all users can read."""
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    (tmp_path / "whoami.py").write_text(HANDLER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def readable_python(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """An interpreter of this version that every user can execute, with the packages of this one."""
    own = Path(sys.executable).resolve()
    if all(parent.stat().st_mode & 0o001 for parent in own.parents):
        return sys.executable
    other = f"/usr/bin/python3.{sys.version_info.minor}"
    if not Path(other).exists():
        pytest.skip(f"{own} is closed to other users")
    packages = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *packages]))
    monkeypatch.setattr(sys, "executable", other)
    return other


@pytest.mark.needs_root
@pytest.mark.usefixtures("readable_python")
async def test_handler_runs_as_the_chosen_user_without_its_workers_secrets() -> None:
    nobody = pwd.getpwnam("nobody")
    outcome = await run(IsolatedExecutor("whoami:who", run_as=find_handler_user("nobody")))
    assert isinstance(outcome, AttemptSuccess), outcome
    result = json.loads(outcome.result)
    assert (result["uid"], result["home"]) == (nobody.pw_uid, nobody.pw_dir)
    assert 0 not in result["groups"]
    assert result["reads_worker"] is False


@pytest.mark.needs_root
@pytest.mark.usefixtures("folder")
async def test_command_runs_as_the_chosen_user() -> None:
    outcome = await run(CommandExecutor("sh -c 'id -u'", run_as=find_handler_user("nobody")))
    assert isinstance(outcome, AttemptSuccess), outcome
    assert json.loads(outcome.result) == pwd.getpwnam("nobody").pw_uid


@pytest.mark.needs_root
@pytest.mark.usefixtures("readable_python")
async def test_worker_completes_tasks_as_the_chosen_user(folder: Path, dsn: str) -> None:
    windlass = CommandLine(folder, {"DATABASE_URL": dsn})
    task_id = (await asyncio.to_thread(windlass, "enqueue", "q", "null", "--json")).json["id"]
    arguments = ("worker", "--queue", "q", "--handler", "whoami:who", "--run-as", "nobody")
    with windlass.start(*arguments) as worker:
        try:
            async with asyncio.timeout(120):
                while True:
                    shown = (await asyncio.to_thread(windlass, "tasks", "show", task_id, "--json")).json
                    if shown["status"] not in ("queued", "running"):
                        break
                    await asyncio.sleep(0.1)
        finally:
            worker.terminate()
    assert shown["result"]["uid"] == pwd.getpwnam("nobody").pw_uid


def test_unknown_user_is_refused_in_one_sentence(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    done = windlass("up", "--queue", "q", "--exec", "true", "--config", str(_configuration(tmp_path, "no-such-user")))
    assert done.code == 2
    assert "user no-such-user not found on this host. Check run_as of fleet default." in done.err


@pytest.mark.needs_root
@pytest.mark.parametrize(("user", "warns"), [("root", True), ("nobody", False)])
async def test_up_as_root_warns_that_handlers_run_as_root(tmp_path: Path, dsn: str, user: str, warns: bool) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn})
    log = tmp_path / "up.log"
    with log.open("w") as output:
        arguments = ("up", "--config", _configuration(tmp_path, user))
        process = windlass.start(*arguments, stdout=output, stderr=output)
    try:
        async with asyncio.timeout(100):
            while "finish cycle" not in log.read_text():
                await asyncio.sleep(0.1)
        assert ("run handlers as root" in log.read_text()) is warns
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)


def test_plain_http_beyond_loopback_ends_up_with_one_sentence(tmp_path: Path, dsn: str) -> None:
    windlass = CommandLine(tmp_path, {"DATABASE_URL": dsn, "WINDLASS_API__HOST": "0.0.0.0"})  # noqa: S104
    done = windlass("up", "--queue", "q", "--exec", "true", "--port", "0")
    assert done.code == 2
    assert done.err.startswith("windlass: api.host is 0.0.0.0 without TLS, which would send tokens unencrypted")


@pytest.mark.parametrize("settings", [{"provider": "hetzner"}, {"is_inline": True}])
def test_run_as_is_refused_where_it_has_no_effect(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="run_as is set"):
        FleetConfig.model_validate({"handler": "app:work", "run_as": "nobody", **settings})


def _configuration(folder: Path, user: str) -> Path:
    path = folder / "windlass.toml"
    path.write_text(f'[fleets.default]\nqueues = ["q"]\nexec = "true"\nrun_as = "{user}"\n')
    return path
