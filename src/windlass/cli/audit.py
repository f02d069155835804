"""`windlass audit`: who did what."""

from typing import Annotated

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, print_table
from windlass.wiring import stores


@command
async def audit(
    actor: Annotated[
        str | None, typer.Option(help="Only this actor, such as token:ci or user:root@host.", metavar="ACTOR")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="Number of changes.", metavar="N")] = 50,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List the changes that people and programs with a token made, newest first."""
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        page = await store.audit_page(actor=actor, limit=limit)
    if as_json:
        print_json(page.rows)
        return
    rows = [
        (
            event.at.strftime("%Y-%m-%d %H:%M:%S"),
            event.actor,
            event.code,
            f"task {event.task_id}" if event.task_id is not None else event.worker_id or event.fleet or "",
            event.reason,
        )
        for event in page.rows
    ]
    if rows:
        print_table(rows, "time (utc)", "actor", "change", "subject", "reason")
    else:
        print("no changes")
