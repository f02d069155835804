"""Reads a fleet's own past from the database, for `windlass simulate` and `windlass tune`."""

from datetime import timedelta
from typing import Annotated

import typer

from windlass.cli.times import parse_when
from windlass.model.config import Config
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.simulator.past import FleetPast, fleet_past
from windlass.simulator.trace import MAX_TASKS
from windlass.wiring import stores

# Far more than a fleet spawns in a month.
MAX_MACHINES = 100_000

Since = Annotated[
    str, typer.Option("--since", help="Start of the fleet's history: 7d ago, or 2030-01-31T00:00Z.", metavar="TIME")
]


def chosen_fleet(config: Config, name: str | None) -> tuple[str, FleetConfig]:
    """The named fleet, or the only one."""
    if name is None:
        if len(config.fleets) != 1:
            raise BadInput(
                "pass --fleet NAME for the history of a fleet, --trace FILE for a file, or --generate KIND."
                if len(config.fleets)
                else "pass a trace file with --trace, or make one with --generate: no fleet is configured."
            )
        name = next(iter(config.fleets))
    if name not in config.fleets:
        raise BadInput(f"fleet {name!r} not found in the configuration.")
    return name, config.fleets[name]


async def read_past(config: Config, name: str, fleet: FleetConfig, since: str, seed: int = 1) -> FleetPast:
    when = parse_when(since, "--since")
    async with stores.store(config, may_create=False) as store:
        now = await store.now()
        begins = now - when if isinstance(when, timedelta) else when
        tasks = await store.task_history(fleet.queues, begins, now, MAX_TASKS)
        machines = await store.machine_history(name, begins, now, MAX_MACHINES)
        if not any(machine.boot_s is not None for machine in machines):
            # A fleet that kept its machines all the time booted them earlier.
            machines = await store.machine_history(name, now - timedelta(days=365), now, MAX_MACHINES)
    return fleet_past(name, fleet, tasks, machines, seed=seed)
