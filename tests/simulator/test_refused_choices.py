"""A choice of machine that is refused while another is had: whoever runs a single cycle reads it there."""

from random import Random
from typing import Any

import pytest

from support import hetzner_fixture as hetzner_bed
from support import runpod_fixture as runpod_bed
from windlass.control.cycle import FleetCycle, run_once
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.task import new_task
from windlass.simulator.loop import run, virtual_now
from windlass.store.memory.stores import MemoryStores


def hetzner() -> tuple[Any, str, str]:
    """A provider, the choice that is refused, and in which words."""
    return hetzner_bed.Bed().provider(choices=["cx99@nbg1", "cx23@nbg1"]), "cx99 in nbg1", "invalid_input"


def runpod() -> tuple[Any, str, str]:
    bed = runpod_bed.Bed()
    bed.faults.next_create(403, detail="not in your plan")
    provider = bed.provider(choices=[runpod_bed.GPU, runpod_bed.OTHER_GPU])
    return provider, f"{runpod_bed.GPU} in SECURE", "not in your plan"


@pytest.mark.parametrize("vendor", [hetzner, runpod])
def test_a_single_cycle_tells_of_a_choice_that_was_refused(vendor: Any) -> None:
    async def live() -> None:
        provider, refused, words = vendor()
        store = MemoryStores(virtual_now)
        fleet = FleetConfig(
            provider=vendor.__name__,
            queues=("red",),
            handler="app:work",
            min_workers=0,
            max_workers=1,
            has_gpu=False,
            runpod={"image": "any", "choices": [runpod_bed.GPU]} if vendor is runpod else {},
        )
        await store.enqueue(new_task("red"))
        cycle = FleetCycle("red", fleet, store, provider, Candidate("ann", 60.0), Random(1))  # noqa: S311
        (summary,) = [summary.to_plain() for summary in await run_once([cycle])]
        assert summary["actions"]["workers_spawned"] == 1
        (told,) = summary["refused_choices"]
        assert told["choice"] == refused
        assert words in told["reason"]

    run(live())
