"""`windlass demo`: the promise of windlass, kept before your eyes."""

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from windlass.cli.common import AsJson, command
from windlass.cli.errors import print_error
from windlass.cli.output import print_json, print_table
from windlass.demo.cloud_report import RentedReport
from windlass.demo.environment import DemoPlace
from windlass.demo.hetzner import HetznerDemo
from windlass.demo.local import LocalDemo
from windlass.demo.local_report import LocalReport
from windlass.demo.ray import RayDemo
from windlass.demo.report import DemoReport
from windlass.demo.runpod import RunpodDemo
from windlass.model.errors import BadInput


class On(StrEnum):
    LOCAL = "local"
    HETZNER = "hetzner"
    RUNPOD = "runpod"
    RAY = "ray"


@command
async def demo(
    on: Annotated[On, typer.Option("--on", help="Where workers live: here, on an emulated cloud, in Ray.")] = (
        On.LOCAL
    ),
    tasks: Annotated[int, typer.Option(min=50, max=5_000, help="How many tasks arrive.", metavar="N")] = 200,
    workers: Annotated[int, typer.Option(min=2, max=16, help="How many workers at the most.", metavar="N")] = 4,
    hour_s: Annotated[
        int, typer.Option(min=30, max=3600, help="hetzner: how long a paid hour lasts.", metavar="SECONDS")
    ] = 60,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it running at the end, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> int:
    """A burst arrives, workers are hired, one is killed, and nothing is lost.

    Runs `windlass up` with real worker processes and tells what happens and why. At the end every task is complete (but
    one that is poison, here), none was accepted twice, and the fleet is back at its minimum. Exit code 1 if that is not
    so.

    With `--on hetzner` workers are servers of a Hetzner Cloud that is emulated on this host, paid by hours of a minute.
    They are created through the vendor's own SDK, boot from cloud-init, join by a token, work over HTTP, and are
    deleted before another hour is charged. The vendor's bill and our ledger must be equal.

    With `--on runpod` they are GPU pods of an emulated Runpod, paid by the second and prepared over SSH. One never
    claims, one loses its GPU, one gets stuck and one is asked to end: each is ended for its own reason and replaced.

    With `--on ray` workers are nodes of a Ray cluster on this host: a head is started, raylets are hired for the burst,
    Ray places the tasks, and one node is killed in the middle. Needs `pip install "windlass[ray]"`.

    Uses a PostgreSQL of its own in a temporary directory, which is gone afterwards.
    """

    if 3600 % hour_s:
        raise BadInput(f"3600 s are no whole number of hours of {hour_s} s: take 30, 60 or 120 for --hour-s.")
    started = time.monotonic()

    def tell(sentence: str) -> None:
        if not as_json:
            print(f"{time.monotonic() - started:5.1f} s  {sentence}", flush=True)

    async with _demonstration(on, tasks, workers, hour_s, tell).running() as (report, place):
        problems = report.problems()
        if as_json:
            print_json({"is_kept": not problems, "problems": problems, **report.as_dict()})
        else:
            _print(report)
        if keep:
            tell("it goes on until Ctrl-C. Look at it from another terminal:")
            for look in _looks(report, place):
                print(f"         {look}", flush=True)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                tell("Ctrl-C: everything is ended and deleted")
    for problem in problems:
        print_error(f"the demo failed: {problem}.")
    return 1 if problems else 0


def _demonstration(
    on: On, tasks: int, workers: int, hour_s: int, tell: "Callable[[str], None]"
) -> "LocalDemo | HetznerDemo | RunpodDemo | RayDemo":
    if on is On.HETZNER:
        return HetznerDemo(tasks, workers, tell, hour_s=hour_s)
    if on is On.RUNPOD:
        return RunpodDemo(tasks, workers, tell)
    if on is On.RAY:
        return RayDemo(tasks, workers, tell)

    return LocalDemo(tasks, workers, tell)


def _print(report: "DemoReport") -> None:

    print()
    print_table(report.lines())
    if isinstance(report, RentedReport):
        print()
        print_table(report.table(), *report.headings, right=report.numbers)
    print(flush=True)


def _looks(report: "DemoReport", place: "DemoPlace") -> list[str]:

    here = f"--data-dir {place.data_dir}"
    if isinstance(report, LocalReport):
        dead = report.poisonous_task_id
        looks = ("status --watch", "explain demo", f"explain {dead}", f"tasks show {dead}")
    else:
        one_more = """'{"number": 0, "work_s": 5, "is_poisonous": false}'"""
        looks = ("status --watch", "cost --by worker", "explain demo", f"enqueue demo {one_more}")
    return [f"windlass {look} {here}" for look in looks]
