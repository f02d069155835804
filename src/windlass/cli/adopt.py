"""`windlass db adopt`: make the rows of an existing table tasks, and take that back (docs/adopt.md)."""

import difflib
import sys
from typing import Annotated

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, load, person_command
from windlass.cli.output import print_json
from windlass.model.adoption import AdoptionConfig, AdoptionFinding
from windlass.model.config import Config
from windlass.model.errors import BadInput
from windlass.wiring import adoption, stores


@person_command
async def adopt(
    name: Annotated[str, typer.Argument(help="The table [adopt.NAME] of the configuration.", metavar="NAME")],
    check: Annotated[bool, typer.Option("--check", help="Compare the configuration with the real table.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Check, then install the triggers.")] = False,
    backfill: Annotated[
        bool, typer.Option("--backfill", help="Enqueue the rows that were queued before. Continues where it ended.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove everything; rows of unfinished tasks are queued again.")
    ] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Make the rows of an existing table tasks.

    Outcomes are written into the rows.

    Without an option it prints the SQL and connects to nothing. --apply and --backfill are safe to repeat. Exit code 1
    if a check fails.
    """
    if remove and (check or apply or backfill):
        raise BadInput("--remove goes with none of --check, --apply and --backfill.")
    loaded = load(config, data_dir).config
    if remove:
        await _remove(loaded, name, as_json=as_json)
        return 0
    table = _configured(loaded, name)
    if not (check or apply or backfill):
        print(adoption.apply_script(name, table), end="")
        return 0
    async with stores.database(loaded, may_create=False) as dsn:
        findings = await adoption.check_table(dsn, name, table) if check or apply else []
        if not as_json:
            _print_findings(findings)
        is_sound = not any(finding.is_error for finding in findings)
        if apply and is_sound:
            await adoption.apply(dsn, name, table)
        is_shown = not as_json and sys.stderr.isatty()
        rows = await _backfill(dsn, name, is_shown=is_shown) if backfill and is_sound else None
    if as_json:
        outcome = {"is_applied": apply and is_sound, "rows_backfilled": rows}
        print_json({"name": name, "findings": findings, **outcome})
    elif apply and is_sound:
        print(f"{'.'.join(table.place(name))} is adopted: new rows become tasks of queue {table.queue or name}")
        if rows is None:
            print(f"rows that were queued before are not enqueued yet: windlass db adopt {name} --backfill")
    if rows is not None and not as_json:
        print(f"{rows:,} existing rows were adopted")
    return 0 if is_sound else 1


async def _remove(config: Config, name: str, *, as_json: bool) -> None:
    # [adopt.NAME] may have been deleted first, so only the name is needed.
    async with stores.database(config, may_create=False) as dsn:
        released = await adoption.remove(dsn, name)
    if as_json:
        print_json({"name": name, "rows_released": released})
    else:
        print(f"{name} is no longer adopted; {released:,} rows of unfinished tasks are queued again")


async def _backfill(dsn: str, name: str, *, is_shown: bool) -> int:
    rows = 0
    async for so_far in adoption.backfill(dsn, name):
        rows = so_far
        if is_shown:
            print(f"\r{rows:,} rows", end="", file=sys.stderr, flush=True)
    if is_shown:
        print(file=sys.stderr)
    return rows


def _configured(config: Config, name: str) -> AdoptionConfig:
    try:
        return config.adopt[name]
    except KeyError:
        close = difflib.get_close_matches(name, config.adopt)
        hint = f"Did you mean {close[0]}?" if close else f"Add a table [adopt.{name}] to windlass.toml."
        raise BadInput(f"[adopt.{name}] is not configured. {hint}") from None


def _print_findings(findings: list[AdoptionFinding]) -> None:
    for finding in findings:
        word = "FAIL" if finding.is_error else "warn" if finding.advice else "ok"
        advice = f": {finding.advice}" if finding.advice else ""
        print(f"{word:<5}{finding.check:<14}{finding.message}{advice}")
