"""`windlass demo`: the promise of the queue, kept before your eyes in under a minute."""

import sys
from typing import Annotated

import typer

from windlass.cli.common import AsJson, command
from windlass.cli.output import print_json, print_table


@command
async def demo(
    tasks: Annotated[int, typer.Option(min=50, max=5_000, help="How many tasks to enqueue.", metavar="N")] = 300,
    workers: Annotated[int, typer.Option(min=2, max=16, help="How many worker processes to start.", metavar="N")] = 4,
    as_json: AsJson = False,
) -> int:
    """Kill a worker and see that nothing is lost.

    Runs a few hundred tasks on real worker processes, kills one of them in the middle of a task, and shows that every
    task is complete and none was accepted twice. Exit code 1 if that is not so.

    Uses a PostgreSQL of its own in a temporary directory, which is gone afterwards.
    """
    from windlass.cli.demo_views import view_for
    from windlass.cli.demonstration import Demonstration

    with view_for(is_silent=as_json) as view:
        report = await Demonstration(tasks, workers, view).run()
    problems = report.problems()
    if as_json:
        print_json({"is_kept": not problems, "problems": problems, **report.as_dict()})
    else:
        print_table(report.lines())
    for problem in problems:
        print(f"windlass: the demo failed: {problem}.", file=sys.stderr)
    return 1 if problems else 0
