"""`windlass explain` and `windlass replay`: the reasons for a state, and a decision repeated with other settings."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, printable
from windlass.config_loader import load_config
from windlass.control.explanation import explain as explain_name
from windlass.model.action import actions_to_plain
from windlass.model.errors import BadInput
from windlass.model.fleet_changes import with_changes
from windlass.policy.plan import plan
from windlass.runbooks import codes_in
from windlass.wiring import stores

# The largest bigint of PostgreSQL.
MAX_CYCLE_ID = 2**63 - 1


@command
async def explain(
    what: Annotated[
        str, typer.Argument(help="Id of a task, id of a worker, or name of a fleet.", metavar="TASK|WORKER|FLEET")
    ],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Explain the state of a task, a worker or a fleet.

    For example: why a task is still queued, why a worker was terminated, why no worker was spawned.
    """
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        explanation = await explain_name(store, what)
    history = explanation.history
    codes = codes_in("\n".join(explanation.answer))
    if as_json:
        plain = [{"at": at, "what": text} for at, text in history]
        print_json({"answer": explanation.answer, "history": plain, "runbooks": codes})
        return
    for sentence in explanation.answer:
        print(printable(sentence))
    for code in codes:
        print(f"What to do: windlass runbook {code}")
    if history:
        print()
    for at, text in history:
        print(f"{at:%Y-%m-%d %H:%M:%S}  {printable(text)}")


@command
async def replay(
    cycle: Annotated[
        int, typer.Argument(help="Id of a cycle, from `windlass explain FLEET`.", min=1, max=MAX_CYCLE_ID)
    ],
    with_config: Annotated[
        Path | None, typer.Option("--with", help="Use the fleet's settings from this file.", metavar="FILE")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one setting of the fleet, for example max_workers=3.", metavar="NAME=VALUE"),
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Repeat the decision of a stored cycle, with other settings.

    With unchanged settings the decision must be the same. Exit code 1 if it is not.
    """
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        stored = await store.cycle(cycle)
    if stored is None:
        raise BadInput(
            f"cycle {cycle} not found (unknown, or already purged). `windlass explain FLEET` lists recent cycles."
        )
    fleet = stored.snapshot.settings
    if with_config is not None:
        fleets = load_config(with_config, {"data_dir": data_dir}, file_named_by="--with").config.fleets
        if stored.cycle.fleet not in fleets:
            raise BadInput(
                f"cycle {cycle} belongs to fleet {stored.cycle.fleet}, which {with_config} does not contain."
            )
        fleet = fleets[stored.cycle.fleet]
    if fleet is None:
        raise BadInput(f"cycle {cycle} was stored without settings: pass a configuration file with --with.")
    again = plan(stored.snapshot, with_changes(fleet, changes or ()))
    then, now = actions_to_plain(stored.cycle.actions), actions_to_plain(again.actions)
    is_same = then == now and stored.cycle.decision == again.decision
    if as_json:
        print_json(
            {
                "cycle_id": cycle,
                "is_same": is_same,
                "then": {"decision": stored.cycle.decision, "actions": then},
                "again": {"decision": again.decision, "actions": now},
            }
        )
    else:
        _print_plan("stored", stored.cycle.decision, then)
        if is_same:
            print("replayed: same decision")
        else:
            _print_plan("replayed", again.decision, now)
    return 0 if is_same or with_config is not None or changes else 1


def _print_plan(title: str, decision: str, actions: list[dict[str, Any]]) -> None:
    print(f"{title}: {printable(decision)}")
    for action in actions:
        details = {key: value for key, value in action.items() if key not in ("kind", "reason") and value is not None}
        print(f"  {action['kind']:<12} {json.dumps(details)}  {printable(action.get('reason', ''))}")
