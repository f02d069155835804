"""The metrics that Prometheus reads."""

from datetime import timedelta
from typing import Any

import pytest

from support.api_fixture import ApiFixture
from windlass.model.counters import CounterBuffer
from windlass.model.task import Finished, new_task
from windlass.store.connection import connected


async def test_metrics_contain_all_watched_series(api: ApiFixture, clock: Any) -> None:
    await api.spawn_active_workers()
    clock.advance(60)
    text = (await api.localhost.get("/metrics")).text
    for line in (
        'windlass_workers{fleet="gpus",status="active"} 2.0',
        'windlass_tasks_queued{queue="a"} 2.0',
        'windlass_cost_per_hour{currency="EUR",fleet="gpus"} 0.72',
        'windlass_provisioning_success_ratio{fleet="gpus"} 1.0',
        'windlass_provider_calls_total{call="create",fleet="gpus",outcome="ok"} 2.0',
        'windlass_provider_calls_total{call="list",fleet="gpus",outcome="ok"} 2.0',
        'windlass_actions_total{action="workers_spawned",fleet="gpus"} 2.0',
        'windlass_worker_restarts{fleet="gpus"} 0.0',
        'windlass_slots_failed{fleet="gpus"} 0.0',
        "windlass_has_leader 1.0",
        'windlass_worker_cost{currency="EUR",fleet="gpus"} 0.006',
        'windlass_cycle_seconds_count{fleet="gpus"} 2.0',
        'windlass_workers{fleet="gpus",status="terminated"} 0.0',
    ):
        assert line in text.splitlines(), f"{line}\n{text}"
    assert "gpus-0" not in text  # no series per worker
    for quantile in ("0.5", "0.95", "0.99"):
        assert f'windlass_boot_seconds{{fleet="gpus",phase="running",quantile="{quantile}"}}' in text


async def test_metrics_of_free_slots_and_queue_clear_time(api: ApiFixture, clock: Any) -> None:
    async def scrape() -> dict[str, float]:
        clock.advance(2)
        api.feed.mark_changed()
        lines = (await api.localhost.get("/metrics")).text.splitlines()
        names = ("windlass_workers_idle", "windlass_slots_free", "windlass_queue_clear_seconds")
        found = (line.split(" ") for line in lines if line.startswith(tuple(f"{name}{{" for name in names)))
        return {name.partition("{")[0].removeprefix("windlass_"): float(value) for name, value in found}

    first, second = await api.spawn_active_workers()
    # The duration of a task is unknown until one is complete.
    assert await scrape() == {"workers_idle": 2, "slots_free": 2}
    (claim,) = await api.store.claim(first, ["a"], 1)
    assert await scrape() == {"workers_idle": 1, "slots_free": 1}
    clock.advance(10)
    await api.store.finish_and_claim(first, [Finished(claim.task_id, claim.token, None)], (), 0)
    for _ in range(4):
        await api.store.enqueue(new_task("a"))
    seen = await scrape()
    assert (seen["workers_idle"], seen["slots_free"]) == (2, 2)
    assert seen["queue_clear_seconds"] == pytest.approx(5 / 2 * 12, abs=0.1)
    # A paused worker has no free slots. Without free slots the clear time is unknown.
    await api.store.set_paused([second], True)
    assert (await scrape())["queue_clear_seconds"] == pytest.approx(5 * 12, abs=0.1)
    await api.store.claim(first, ["a"], 1)
    assert await scrape() == {"workers_idle": 0, "slots_free": 0}
    async with connected(api.dsn, "emptying the queue") as connection:
        await connection.execute("delete from windlass.tasks where status = 'queued'")
    assert await scrape() == {"workers_idle": 0, "slots_free": 0, "queue_clear_seconds": 0}


async def test_counters_start_at_zero(api: ApiFixture) -> None:
    counters = CounterBuffer()
    counters.start_at_zero(["gpus"], ["slack"])
    await api.store.add_counters(counters.take())
    text = (await api.localhost.get("/metrics")).text
    for line in (
        'windlass_provider_calls_total{call="create",fleet="gpus",outcome="error"} 0.0',
        'windlass_worker_failures_total{fleet="gpus"} 0.0',
        'windlass_alert_messages_total{notifier="slack",outcome="failed"} 0.0',
    ):
        assert line in text.splitlines(), f"{line}\n{text}"


async def test_alerts_with_one_code_are_one_series(api: ApiFixture) -> None:
    first, _ = await api.spawn_active_workers()
    async with connected(api.dsn, "adding alerts") as connection:
        await connection.execute(
            "insert into windlass.alerts (fleet, key, code, severity, reason)"
            " select 'gpus', 'SLOT_FAILED ' || n, 'SLOT_FAILED', 'critical', 'x' from generate_series(1, 2) as n"
        )
    await api.store.terminate_worker(first, "by hand")
    for _ in range(2):
        await api.run_cycle()
    lines = (await api.localhost.get("/metrics")).text.splitlines()
    firing = [line for line in lines if line.startswith("windlass_alerts_firing{")]
    assert firing == ['windlass_alerts_firing{code="SLOT_FAILED",fleet="gpus",severity="critical"} 2.0']
    assert 'windlass_workers{fleet="gpus",status="terminated"} 1.0' in lines


async def test_worker_failures_are_counted_and_timed(api: ApiFixture, clock: Any) -> None:
    await api.spawn_active_workers()
    clock.advance(timedelta(hours=1).total_seconds())
    await api.run_cycle()
    # No outage between these cycles, and together more than the heartbeat timeout of 30 s.
    for _ in range(3):
        clock.advance(12)
        await api.run_cycle()
    text = (await api.localhost.get("/metrics")).text
    assert 'windlass_worker_failures_total{fleet="gpus"} 2.0' in text
    assert 'windlass_since_last_failure_seconds{fleet="gpus"} 0.0' in text
