"""`windlass demo`: the promise of windlass, kept before your eyes in about a minute."""

import sys
from typing import Annotated

import typer

from windlass.cli.common import AsJson, command
from windlass.cli.output import print_json, print_table


@command
async def demo(
    tasks: Annotated[int, typer.Option(min=50, max=5_000, help="How many tasks arrive.", metavar="N")] = 200,
    workers: Annotated[int, typer.Option(min=2, max=16, help="How many workers at the most.", metavar="N")] = 4,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it running at the end, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> int:
    """A burst arrives, workers are hired, one is killed, one task is poison, and nothing is lost.

    Runs `windlass up` with real worker processes and tells what happens and why. At the end every task is complete
    but the poisonous one, none was accepted twice, and the fleet is back at its minimum. Exit code 1 if that is not so.

    Uses a PostgreSQL of its own in a temporary directory, which is gone afterwards.
    """
    import asyncio
    import time

    from windlass.cli.demonstration import Demonstration

    started = time.monotonic()

    def tell(sentence: str) -> None:
        if not as_json:
            print(f"{time.monotonic() - started:5.1f} s  {sentence}", flush=True)

    async with Demonstration(tasks, workers, tell).running() as (report, data_dir):
        problems = report.problems()
        if as_json:
            print_json({"is_kept": not problems, "problems": problems, **report.as_dict()})
        else:
            print()
            print_table(report.lines())
            print(flush=True)
        if keep:
            tell("it goes on until Ctrl-C. Look at it from another terminal:")
            dead = report.poisonous_task_id
            for look in ("status --watch", "explain demo", f"explain {dead}", f"tasks show {dead}"):
                print(f"         windlass {look} --data-dir {data_dir}", flush=True)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                tell("Ctrl-C: everything is ended and deleted")
    for problem in problems:
        print(f"windlass: the demo failed: {problem}.", file=sys.stderr)
    return 1 if problems else 0
