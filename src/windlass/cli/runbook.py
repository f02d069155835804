"""`windlass runbook`: what a code means and what to do."""

import difflib
from typing import Annotated

import typer

from windlass.cli.options import AsJson, command
from windlass.cli.output import print_json
from windlass.model.errors import BadInput
from windlass.runbooks import procedures, runbooks


@command
def runbook(
    code: Annotated[
        str,
        typer.Argument(
            help="A code of an alert, a hold, a task, a worker or an HTTP error, such as WORKER_LOST.", metavar="CODE"
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Print what a code means and what to do about it.

    The procedures that its row names follow.
    """
    known = runbooks()
    name = code.upper()
    if not known:
        raise BadInput("this installation has no runbooks. Install Windlass from its wheel or a clone.")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"Similar codes: {', '.join(near)}." if near else "docs/runbooks.md lists all codes."
        raise BadInput(f"no runbook for {code}. {hint}")
    if as_json:
        print_json([{"code": each.code, "section": each.section, **each.columns} for each in known[name]])
        return
    for number, each in enumerate(known[name]):
        if number:
            print()
        print(f"{each.code} ({each.section})")
        for heading, text in each.columns.items():
            print(f"  {heading}: {text}")
    for anchor in dict.fromkeys(anchor for each in known[name] for anchor in each.see):
        print(f"\n{procedures()[anchor]}")
