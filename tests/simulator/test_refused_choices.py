"""The summary of a single cycle reports a refused choice while another one succeeds."""

from random import Random
from typing import Any

import pytest

from support import hetzner_fixture, runpod_fixture
from windlass.control.cycle import FleetCycle, run_once
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.task import new_task
from windlass.simulator.loop import run, virtual_now
from windlass.store.memory.stores import MemoryStores


def hetzner() -> tuple[Any, str, str]:
    """A provider, the choice that is refused, and in which words."""
    return (
        hetzner_fixture.EmulatedHetzner().provider(choices=["cx99@nbg1", "cx23@nbg1"]),
        "cx99 in nbg1",
        "invalid_input",
    )


def runpod() -> tuple[Any, str, str]:
    cloud = runpod_fixture.EmulatedRunpod()
    cloud.faults.next_create(403, detail="not in your plan")
    provider = cloud.provider(choices=[runpod_fixture.GPU, runpod_fixture.OTHER_GPU])
    return provider, f"{runpod_fixture.GPU} in SECURE", "not in your plan"


@pytest.mark.parametrize("vendor", [hetzner, runpod])
def test_single_cycle_reports_a_refused_choice(vendor: Any) -> None:
    async def scenario() -> None:
        provider, refused, message = vendor()
        store = MemoryStores(virtual_now)
        fleet = FleetConfig(
            provider=vendor.__name__,
            queues=("red",),
            handler="app:work",
            min_workers=0,
            max_workers=1,
            has_gpu=False,
            runpod={"image": "any", "choices": [runpod_fixture.GPU]} if vendor is runpod else {},
        )
        await store.enqueue(new_task("red"))
        cycle = FleetCycle("red", fleet, store, provider, Candidate("ann", 60.0), Random(1))  # noqa: S311
        (summary,) = [summary.to_plain() for summary in await run_once([cycle])]
        assert summary["actions"]["workers_spawned"] == 1
        (reported,) = summary["refused_choices"]
        assert reported["choice"] == refused
        assert message in reported["reason"]

    run(scenario())
