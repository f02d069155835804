"""Configuration of a running `windlass up`: settings that workers get, reloads, and fleets added or removed."""

import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from support.command_line import CommandLine
from support.local_fleet import FleetHost, open_fleet_host
from support.worker_harness import PATIENCE_S, until
from windlass.model.lease import process_of_holder
from windlass.model.task import TaskStatus


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[FleetHost]:
    async with open_fleet_host(tmp_path, dsn) as host:
        yield host


async def test_invalid_file_does_not_stop_a_running_up_from_spawning(host: FleetHost) -> None:
    """Workers get their settings from the orchestrator and read no file."""
    host.configure(min_workers=1)
    up = host.up()
    (killed,) = await host.until_workers(1)
    (host.folder / "windlass.toml").write_text("nonsense")
    assert killed.pid is not None
    psutil.Process(killed.pid).kill()

    async def is_replaced() -> bool:
        return [worker.status for worker in await host.store.workers() if worker.id != killed.id] == ["active"]

    await until(is_replaced, f"a replacement\n{host.log()}")
    await host.stop(up)


async def test_workers_get_settings_of_the_named_file_and_no_provider_keys(host: FleetHost) -> None:
    host.configure("other.toml", env={"GIVEN": "on purpose"})
    text = (host.folder / "other.toml").read_text()
    (host.folder / "other.toml").write_text(text.replace("[control]", "[worker]\ntimeout_s = 77.5\n[control]"))
    (host.folder / "windlass.toml").write_text("nonsense")
    names = ["WINDLASS_WORKER__TIMEOUT_S", "GIVEN", "RUNPOD_API_KEY", "HETZNER_API_TOKEN", "SUPABASE_SERVICE_ROLE_KEY"]
    # GPU_IDLE_TIMEOUT_SEC conflicts with settings of this fleet. Workers must not validate it.
    host.windlass = host.windlass.with_env(**dict.fromkeys(names[2:], "secret"), GPU_IDLE_TIMEOUT_SEC="12")
    tasks = await host.enqueue(*({"env": name} for name in (*names, "DATABASE_URL")))
    up = host.up("--config", "other.toml")
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    *results, url = [json.loads((await host.task(task_id)).result or "") for task_id in tasks]
    assert results == ["77.5", "on purpose", None, None, None]
    assert url.startswith("postgresql://")
    await host.stop(up)


async def test_handlers_get_database_url_from_fleet_env_not_from_the_file(host: FleetHost, dsn: str) -> None:
    own = "postgresql://handlers.own/db"
    host.configure(env={"DATABASE_URL": own})
    text = (host.folder / "windlass.toml").read_text()
    (host.folder / "windlass.toml").write_text(f"database_url = {json.dumps(dsn)}\n{text}")
    host.windlass = host.windlass.with_env(DATABASE_URL="")
    tasks = await host.enqueue({"names_of": dsn}, {"env": "DATABASE_URL"})
    up = host.up()
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    assert [json.loads((await host.task(task)).result or "") for task in tasks] == [[], own]
    await host.stop(up)


async def test_reload_applies_a_valid_file_and_ignores_an_invalid_one(host: FleetHost) -> None:
    go = host.folder / "go"
    host.configure(max_workers=1)
    tasks = await host.enqueue(*[{"go": str(go)}] * 2)
    up = host.up()
    await host.until_workers(1)
    host.configure(max_workers=2)
    up.send_signal(signal.SIGHUP)
    await host.until_workers(2)
    without_command = {"handler": None, "exec": "nosuch-command now"}
    for broken in ({"max_workers": 0}, {"handler": None}, {"handler": "app:nosuch"}, without_command):
        host.configure(**broken)
        failures = host.log().count("reload configuration failed")
        up.send_signal(signal.SIGHUP)
        await until(
            lambda failures=failures: host.log().count("reload configuration failed") > failures,
            f"the log line\n{host.log()}",
        )
    assert "fleets.default.max_workers (from windlass.toml) is 0" in host.log()
    assert "fleet default has nothing to run" in host.log()
    assert "fleet default: cannot find nosuch in app. Check the name after the colon." in host.log()
    assert "command 'nosuch-command' not found. Check exec of fleet default" in host.log()
    go.touch()
    await host.until_status(TaskStatus.COMPLETE, *tasks)
    await host.until_workers(0)
    assert (await host.fleet()).max_workers == 2
    await host.stop(up)


async def test_reload_names_new_settings_without_effect(host: FleetHost) -> None:
    host.configure(auto_start_worker=True)
    up = host.up()
    await until(lambda: "finish cycle" in host.log(), f"a cycle\n{host.log()}")
    host.configure(auto_start_worker=True, storage_min_free_gb=7)
    assert host.windlass("reload").code == 0
    await until(lambda: "reloaded configuration" in host.log(), f"the reload\n{host.log()}")
    assert host.log().count("fleets.default.storage_min_free_gb (from windlass.toml) has no effect") == 1
    assert host.log().count("fleets.default.auto_start_worker (from windlass.toml) has no effect") == 1
    await host.stop(up)


async def test_reload_uses_new_provider_keys_and_failed_reload_changes_nothing(host: FleetHost) -> None:
    settings = (host.folder / "windlass.toml").read_text()
    far = '[fleets.far]\nprovider = "hetzner"\nhandler = "app:work"\nqueues = ["far"]\n'
    host.windlass = host.windlass.with_env(WINDLASS_API__URL="http://127.0.0.1:9")
    up = host.up()
    # SIGHUP must never end the process, also right after the start.
    await until(lambda: _handles_sighup(up.pid), "the signal handler")
    up.send_signal(signal.SIGHUP)
    await until(lambda: "reloaded configuration" in host.log(), f"a first reload\n{host.log()}")
    changed = settings.replace("max_workers = 3", "max_workers = 2")
    # This file is valid. The missing SSH key is found when the provider is created.
    without_key = (
        '[fleets.pods]\nprovider = "runpod"\nhandler = "app:work"\nqueues = ["far"]\nauto_start_worker = true\n'
        'runpod.image = "i:1"\n'
    )
    account = 'hetzner_api_token = "of-the-new-file"\nhetzner_endpoint = "http://127.0.0.1:9/v1"\n'
    account += 'runpod_api_key = "any"\nrunpod_endpoint = "http://127.0.0.1:9/v2"\n'
    (host.folder / "windlass.toml").write_text(f"{account}{changed}\n{without_key}")
    up.send_signal(signal.SIGHUP)
    await until(lambda: "reload configuration failed" in host.log(), f"the log line\n{host.log()}")
    assert "fleet pods has auto_start_worker, which needs an SSH key" in host.log()
    (host.folder / "windlass.toml").write_text(f"{account}{settings}\n{far}")
    up.send_signal(signal.SIGHUP)
    await until(lambda: '"new": ["far"]' in host.log(), f"the new fleet\n{host.log()}")
    assert '"changed"' not in host.log()
    await until(lambda: "list machines failed" in host.log(), f"a call to the provider\n{host.log()}")


async def test_up_without_fleets_runs_while_an_unconfigured_fleet_has_workers(host: FleetHost) -> None:
    host.configure(min_workers=1)
    file = host.folder / "windlass.toml"
    whole = file.read_text()
    without = whole.partition("[fleets.default]")[0]
    up = host.up("--leave-workers")
    (worker,) = await host.until_workers(1)
    up.send_signal(signal.SIGTERM)
    await until(lambda: up.poll() is not None, f"end of up\n{host.log()}")
    file.write_text(without)
    again = host.up()
    found = '"event": "found unconfigured fleet"'
    await until(lambda: found in host.log(), f"the log line\n{host.log()}")
    assert '"shut_down_in_s": 300.0' in host.log()
    file.write_text(whole)
    again.send_signal(signal.SIGHUP)
    await until(lambda: '"new": ["default"]' in host.log(), f"the fleet in the configuration again\n{host.log()}")
    assert [each.id for each in await host.until_workers(1)] == [worker.id]
    file.write_text(without)
    again.send_signal(signal.SIGHUP)
    await until(lambda: "the configuration has no fleets" in host.log(), f"a refused reload\n{host.log()}")
    assert [each.id for each in await host.until_workers(1)] == [worker.id]
    await host.stop(again)
    done = host.windlass("up")
    assert (done.code, done.err) == (
        2,
        "windlass: no fleet is configured: add a table [fleets.NAME] with queues and a handler to windlass.toml, or "
        "give --queue and --handler.\n",
    )


async def test_up_without_fleets_is_refused_while_another_process_leads(host: FleetHost) -> None:
    host.configure(min_workers=1, lease_s=600)
    up = host.up()
    await host.until_workers(1)
    leader = process_of_holder(await host.store.leader() or "")
    (host.folder / "windlass.toml").unlink()
    refused = host.windlass("up")
    assert leader is not None
    assert (refused.code, refused.err) == (
        2,
        "windlass: no fleet is configured: add a table [fleets.NAME] with queues and a handler to windlass.toml, or "
        f"give --queue and --handler. Nothing was started: pid {leader[1]} on host {leader[0]} leads in this "
        "database.\n",
    )
    assert len(await host.until_workers(1)) == 1
    # The lease of a killed `up` expires only after minutes, and its worker needs an orchestrator.
    up.kill()
    up.wait(PATIENCE_S)
    await until(lambda: not psutil.pid_exists(leader[1]), "the end of the leader")
    successor = host.up()
    await until(lambda: "wait as standby" in host.log(), f"a start\n{host.log()}")
    successor.terminate()
    await until(lambda: successor.poll() is not None, f"end of up\n{host.log()}")
    assert successor.returncode == 0, host.log()


def test_up_without_fleets_creates_no_database_or_schema(tmp_path: Path, empty_dsn: str) -> None:
    done = CommandLine(tmp_path)("up", "--data-dir", tmp_path / "data")
    assert (done.code, done.err[:32]) == (2, "windlass: no fleet is configured")
    assert not (tmp_path / "data").exists()
    unmigrated = CommandLine(tmp_path, {"DATABASE_URL": empty_dsn})
    assert unmigrated("up").err == done.err
    assert json.loads(unmigrated("db", "status", "--json").out)["version"] is None


def _handles_sighup(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) & 1 << (signal.SIGHUP - 1))


async def test_removed_fleet_is_shown_only_with_all_option(host: FleetHost) -> None:
    host.configure(min_workers=1)
    up = host.up()
    await host.until_workers(1)
    text = (host.folder / "windlass.toml").read_text()
    (host.folder / "windlass.toml").write_text(text.replace("[fleets.default]", "[fleets.other]"))
    up.send_signal(signal.SIGHUP)
    await until(lambda: "reloaded configuration" in host.log(), "the reload")
    (line,) = [json.loads(text) for text in host.log().splitlines() if "reloaded configuration" in text]
    assert (line["new"], line["removed"]) == (["other"], ["default"])

    def fleets(*options: str) -> list[str]:
        return [fleet["name"] for fleet in host.windlass("status", "--json", *options).json["fleets"]]

    await until(lambda: "default" not in fleets(), f"the end of fleet default\n{host.log()}")
    assert fleets("--all") == ["default", "other"]
    (host.folder / "windlass.toml").write_text(text.replace("[fleets.default]", "[fleets.other]") + "\npriority=1")
    up.send_signal(signal.SIGHUP)
    await until(lambda: "fleets.other.priority in windlass.toml is not a setting" in host.log(), "the error in the log")
    changed = text.replace("[fleets.default]", "[fleets.other]").replace("max_workers = 3", "max_workers = 2")
    (host.folder / "windlass.toml").write_text(changed)
    up.send_signal(signal.SIGHUP)
    await until(lambda: "other (max_workers)" in host.log(), f"the changed setting in the log\n{host.log()}")
    await host.stop(up)


async def test_up_options_add_a_fleet_to_those_of_the_file(host: FleetHost) -> None:
    text = (host.folder / "windlass.toml").read_text()
    (host.folder / "windlass.toml").write_text(text.replace("[fleets.default]", "[fleets.other]"))
    up = host.up("--queue", "extra", "--handler", "app:work", "--max", "2", "--chdir", str(host.folder))

    async def limits() -> list[tuple[str, int]]:
        return [(fleet.name, fleet.max_workers) for fleet in await host.store.fleets() if fleet.planned_at]

    async def are_both_planned() -> bool:
        return await limits() == [("default", 2), ("other", 3)]

    await until(are_both_planned, f"two fleets\n{host.log()}")
    await host.stop(up)
