"""What demonstrations on rented machines share: their configuration, bursts of tasks, and our side of the bill."""

import socket
from collections.abc import Collection
from datetime import timedelta

from windlass.cost.queries import build_report
from windlass.cost.report import By
from windlass.demo.environment import FLEET, QUEUE, DemoEnvironment
from windlass.model.task import NewTask, new_task
from windlass.wiring import stores

WORK_S = (0.4, 0.5, 0.6)
MAX_COSTS = 1000


def burst(count: int, stuck: Collection[int] = ()) -> list[NewTask]:
    """`stuck`: the numbers of those that do not end when they are first tried."""
    return [
        new_task(
            QUEUE,
            {
                "number": number,
                "work_s": WORK_S[number % len(WORK_S)],
                "is_poisonous": False,
                "is_stuck": number in stuck,
            },
        )
        for number in range(count)
    ]


def shown(toml: str) -> str:
    return "the configuration:\n\n" + "".join(f"         {line}\n" for line in toml.splitlines())


async def our_costs(stage: DemoEnvironment) -> dict[str, int]:
    """By worker. Of machines that are gone this is exact, whether or not their accounts are closed yet."""
    async with stores.control_store(stage.config) as store:
        now = await store.now()
        report = await build_report(store, By.WORKER, now - timedelta(hours=2), now, FLEET, MAX_COSTS)
    return {str(cost.key): cost.total_micros for cost in report.costs}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port
