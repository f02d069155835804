"""The same load through `windlass up` with local workers and through the simulator: machine seconds and waits.

    python -m bench.reality --tasks 120 --minutes 3

Real processes, a real PostgreSQL (embedded), tasks that sleep, in a temporary folder that is deleted. The simulator
gets what the database recorded: arrivals and durations of tasks, and boots of workers. Exits by itself.

Time is compressed: cycles of 1 s, and workers whose handler takes `--boot` seconds to import, as a machine takes a
minute to boot. The wake-up and the cycle before the first request take up to a second and are not compressed; the
simulator decides at once. So boots must be longer than that, as those of rented machines are.

The simulator runs twice: with the measured boots in the order of the requests, and, as `windlass simulate` does, with
boots that are drawn from their distribution. Where few tasks wait, the p95 wait is the boot of one machine, so that a
single draw says little: of the drawn runs the mean and the range over DRAWS seeds are shown.
"""

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import windlass
from bench.figures import table
from windlass.config_loader import load_config
from windlass.model.task import TaskStatus
from windlass.simulator.engine import SimulatedFleet, World
from windlass.simulator.full_path import PlanController
from windlass.simulator.measures import measure, quantile
from windlass.simulator.past import fleet_past, simulated_settings
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import Trace
from windlass.wiring import stores

APP = """
import time

time.sleep({boot})

def work(task):
    time.sleep(task.payload["seconds"])
"""
TOML = """
[fleets.default]
queues = ["work"]
handler = "app:work"
chdir = {folder!r}
max_workers = {most}
poll_interval_s = 1
heartbeat_interval_s = 0.5
policy = {policy!r}
"""
START_TIMEOUT_S = 120.0
DRAWS = 20


class FleetWithBoots(SimulatedFleet):
    """Machines boot as the real ones did, in the same order. Further ones are drawn."""

    def __init__(self, trace: Trace, world: World, boots_s: Sequence[float]) -> None:
        super().__init__(trace, world)
        self._measured = list(boots_s)

    def _boot_time_s(self) -> float:
        return self._measured.pop(0) if self._measured else super()._boot_time_s()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=120)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="mean duration of a task")
    parser.add_argument("--max", type=int, default=4, help="max_workers")
    parser.add_argument("--boot", type=float, default=6.0, help="seconds that the import of the handler takes")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="windlass-reality-") as name:
        folder = Path(name)
        # For the user that runs PostgreSQL, if this is root.
        folder.chmod(0o755)
        (folder / "app.py").write_text(APP.format(boot=arguments.boot))
        (folder / "windlass.toml").write_text(TOML.format(folder=name, most=arguments.max, policy=arguments.policy))
        command = [sys.executable, "-m", "windlass", "up", "--no-serve", "--data-dir", str(folder / "data")]
        with (folder / "up.log").open("wb") as log:
            up = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            asyncio.run(compare(folder, arguments))
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(START_TIMEOUT_S)


async def compare(folder: Path, arguments: argparse.Namespace) -> None:
    config = load_config(folder / "windlass.toml", {"data_dir": folder / "data"}).config
    fleet = config.fleets["default"]
    deadline = time.monotonic() + START_TIMEOUT_S
    while stores.running_database_url(config) is None:
        if time.monotonic() > deadline:
            raise SystemExit((folder / "up.log").read_text())
        await asyncio.sleep(0.2)
    source = random.Random(arguments.seed)
    arrivals = sorted(source.random() * arguments.minutes * 60 for _ in range(arguments.tasks))
    begins = time.monotonic()
    async with windlass.Client(data_dir=folder / "data") as client, stores.store(config) as store:
        since = await store.now()
        for at in arrivals:
            await asyncio.sleep(max(0.0, begins + at - time.monotonic()))
            await client.enqueue("work", {"seconds": source.expovariate(1 / arguments.seconds)})
        while True:
            tasks = await store.tasks(queue="work", limit=arguments.tasks)
            if all(task.status is TaskStatus.COMPLETE for task in tasks):
                break
            await asyncio.sleep(0.5)
        until = max(task.finished_at for task in tasks if task.finished_at is not None)
        now = await store.now()
        history = await store.task_history(fleet.queues, since, now, arguments.tasks)
        machines = await store.machine_history("default", since - timedelta(minutes=1), now, 10_000)
    waits = sorted((task.started_at - task.created_at).total_seconds() for task in tasks if task.started_at is not None)
    # Until the last task ended, as in the simulator.
    lived_s = sum(
        max(0.0, min(machine.lived_s, (until - machine.requested_at).total_seconds())) for machine in machines
    )
    past = fleet_past("default", fleet, history, machines)
    settings = simulated_settings(fleet, past.world)
    requested = sorted(machines, key=lambda machine: machine.requested_at)
    boots_s = [machine.boot_s for machine in requested if machine.boot_s is not None]
    measured = FleetWithBoots(past.trace, past.world, boots_s)
    measured.run(PlanController(settings))
    same = measure(measured, fleet.policy, 0.0)
    drawn = [
        run_policy(RunRequest(fleet.policy, settings, replace(past.world, seed=seed)), past.trace)
        for seed in range(1, DRAWS + 1)
    ]
    print(f"{arguments.tasks} tasks in {arguments.minutes:g} min, {arguments.policy}, boots of ", end="")
    print(", ".join(f"{boot_s:.2f}" for boot_s in boots_s[:12]), "s")
    begun = min(task.created_at for task in tasks)
    print(f"first machine requested {(requested[0].requested_at - begun).total_seconds():.2f} s after the first task")
    print("longest waits: ", ", ".join(f"{wait_s:.2f}" for wait_s in waits[:-7:-1]), "s")
    print("simulated:     ", ", ".join(f"{wait_s:.2f}" for wait_s in sorted(measured.waits)[:-7:-1]), "s\n")
    rows = [
        _row("machine seconds", lived_s, same.machine_seconds_billed, [run.machine_seconds_billed for run in drawn]),
        _row("p95 wait, s", quantile(waits, 0.95), same.wait_p95_s, [run.wait_p95_s for run in drawn]),
        _row("mean wait, s", sum(waits) / len(waits), same.wait_mean_s, [run.wait_mean_s for run in drawn]),
        _row("machines started", len(machines), same.machines_started, [run.machines_started for run in drawn]),
    ]
    print(
        table(["", "orchestrator", "simulator, same boots", "difference", "boots drawn", "difference", "range"], rows)
    )


def _row(name: str, real: float, same: float, drawn: Sequence[float]) -> list[str]:
    mean = statistics.fmean(drawn)
    cells = [name, f"{real:.2f}", f"{same:.2f}", _difference(same, real), f"{mean:.2f}", _difference(mean, real)]
    return [*cells, f"{min(drawn):.2f} to {max(drawn):.2f}"]


def _difference(made: float, real: float) -> str:
    return f"{made / real - 1:+.1%}" if real else ""


if __name__ == "__main__":
    main()
