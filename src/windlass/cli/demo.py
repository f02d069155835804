"""`windlass demo`: shows what windlass does, on this host."""

import asyncio
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.errors import print_error
from windlass.cli.options import AsJson, command
from windlass.cli.output import print_json, print_table
from windlass.demo.environment import DemoPlace
from windlass.demo.hetzner import HetznerDemo
from windlass.demo.local import LocalDemo
from windlass.demo.ray import RayDemo
from windlass.demo.runpod import RunpodDemo
from windlass.demo.scenario import DemoScenario
from windlass.model.auth import Role
from windlass.model.config import Config
from windlass.model.errors import BadInput
from windlass.wiring.http_server import dashboard_link


class DemoProvider(StrEnum):
    LOCAL = "local"
    HETZNER = "hetzner"
    RUNPOD = "runpod"
    RAY = "ray"


@command
async def demo(
    on: Annotated[
        DemoProvider, typer.Option("--on", help="Where workers run: on this host, in an emulated cloud, or in Ray.")
    ] = DemoProvider.LOCAL,
    tasks: Annotated[int, typer.Option(min=50, max=5_000, help="Number of tasks.", metavar="N")] = 200,
    workers: Annotated[int, typer.Option(min=2, max=16, help="Maximum number of workers.", metavar="N")] = 4,
    hour_s: Annotated[
        int, typer.Option(min=30, max=3600, help="hetzner: length of a billed hour.", metavar="SECONDS")
    ] = 60,
    keep: Annotated[bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show autoscaling and crash recovery on this host, in under a minute.

    Runs `windlass up` with real worker processes and prints what happens and why. A burst of tasks arrives, workers are
    spawned, one worker is killed, and one task kills every worker that runs it. At the end every other task must be
    complete, none completed twice, and the fleet at its minimum. Exit code 1 if a check fails.

    --on hetzner: workers are servers of an emulated Hetzner Cloud, billed by hours of a minute. They are created with
    Hetzner's SDK, boot from cloud-init, join with a token, work over HTTP, and are deleted before the next hour. The
    bill and our ledger must be equal.

    --on runpod: workers are GPU pods of an emulated Runpod, billed by the second and prepared over SSH. One never
    claims, one loses its GPU, one hangs, one is drained. Each is terminated for its own reason and replaced.

    --on ray: workers are nodes of a Ray cluster on this host. Ray places the tasks, and one node is killed. Needs
    `pip install "ray>=2.55"` in this environment.

    Uses its own PostgreSQL in a temporary folder, which is deleted afterwards.
    """
    if 3600 % hour_s:
        raise BadInput(f"--hour-s {hour_s} does not divide 3600: use 30, 60 or 120.")
    started = time.monotonic()

    def print_line(line: str) -> None:
        if not as_json:
            print(f"{time.monotonic() - started:5.1f} s  {line}", flush=True)

    async with _scenario(on, tasks, workers, hour_s, print_line).run() as (report, place):
        problems = report.problems()
        if as_json:
            print_json({"is_kept": not problems, "problems": problems, **report.as_dict()})
        else:
            print()
            print_table(report.lines())
            rows, headings = report.machine_table()
            if rows:
                print()
                numbers = ("lifetime", "hours", "bill (micros)", "ledger (micros)")
                print_table(rows, *headings, right=numbers)
            print(flush=True)
        if keep:
            print_line("running until Ctrl-C. In another terminal, try:")
            for suggested in suggested_commands(place, report.poisonous_task_id, program_name(sys.argv[0])):
                print(f"         {suggested}", flush=True)
            # A new one: each link works once.
            link = await dashboard_link(Config(data_dir=place.data_dir), Role.OPERATOR, None, "demo")
            print(f"         dashboard: {link}", flush=True)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                print_line("Ctrl-C: stopping and deleting everything")
    for problem in problems:
        print_error(f"demo check failed: {problem}.")
    return 1 if problems else 0


def suggested_commands(place: DemoPlace, poisonous_task_id: int | None, program: str) -> list[str]:
    """Commands to try in another terminal. `program`: as a shell starts it."""
    if (failed := poisonous_task_id) is not None:
        commands = ("status --watch", "explain demo", f"explain {failed}", f"tasks show {failed}")
    else:
        payload = """'{"number": 0, "work_s": 5, "is_poisonous": false}'"""
        commands = ("status --watch", "cost --by worker", "explain demo", f"enqueue demo {payload}")
    return [f"{program} {command} --data-dir {shlex.quote(str(place.data_dir))}" for command in commands]


def program_name(argv0: str) -> str:
    """How a shell starts this program: `windlass` only if PATH finds this one, otherwise as it was invoked."""
    name = Path(argv0).name
    if name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m windlass"
    found = shutil.which(name)
    is_on_path = found is not None and Path(found).resolve() == Path(argv0).resolve()
    return name if is_on_path else shlex.quote(argv0)


def _scenario(
    on: DemoProvider, tasks: int, workers: int, hour_s: int, print_line: Callable[[str], None]
) -> DemoScenario:
    if on is DemoProvider.HETZNER:
        return HetznerDemo(tasks, workers, print_line, hour_s=hour_s)
    if on is DemoProvider.RUNPOD:
        return RunpodDemo(tasks, workers, print_line)
    return (RayDemo if on is DemoProvider.RAY else LocalDemo)(tasks, workers, print_line)
