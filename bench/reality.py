"""The same load through `windlass up` with local workers and through the simulator: machine seconds and waits.

    python -m bench.reality --tasks 120 --minutes 3

Real processes, a real PostgreSQL (embedded), tasks that sleep, in a temporary folder that is deleted. The simulator
gets what the database recorded: arrivals and durations of tasks, and boots of workers. Exits by itself.
"""

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import windlass
from bench.figures import table
from windlass.config_loader import load_config
from windlass.model.task import TaskStatus
from windlass.simulator.measures import quantile
from windlass.simulator.past import fleet_past, simulated_settings
from windlass.simulator.runs import RunRequest, run_policy
from windlass.wiring import stores

APP = """
import time

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=120)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="mean duration of a task")
    parser.add_argument("--max", type=int, default=4, help="max_workers")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="windlass-reality-") as name:
        folder = Path(name)
        # For the user that runs PostgreSQL, if this is root.
        folder.chmod(0o755)
        (folder / "app.py").write_text(APP)
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
    simulated = run_policy(RunRequest(fleet.policy, simulated_settings(fleet, past.world), past.world), past.trace)
    rows = [
        ("machine seconds", lived_s, simulated.machine_seconds_billed),
        ("p95 wait, s", quantile(waits, 0.95), simulated.wait_p95_s),
        ("mean wait, s", sum(waits) / len(waits), simulated.wait_mean_s),
        ("machines started", float(len(machines)), float(simulated.machines_started)),
    ]
    print(f"{arguments.tasks} tasks in {arguments.minutes:g} min, {arguments.policy}, ", end="")
    print(f"boots of {past.world.boot_s:.2f} s\n")
    cells = [
        [name, f"{real:.2f}", f"{made:.2f}", f"{made / real - 1:+.1%}" if real else ""] for name, real, made in rows
    ]
    print(table(["", "orchestrator", "simulator", "difference"], cells))


if __name__ == "__main__":
    main()
