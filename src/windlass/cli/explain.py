"""`windlass explain` and `replay`: why it is so, and what would have been."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, printable
from windlass.model.errors import BadInput

# PostgreSQL's bigint.
MAX_CYCLE_ID = 2**63 - 1


@command
async def explain(
    what: Annotated[
        str, typer.Argument(help="A task's id, a worker's id, or a fleet's name.", metavar="TASK|WORKER|FLEET")
    ],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Tell the story: why is this task waiting, why was this worker ended, why was nobody hired."""
    from windlass.control.explain import explain as explain_name
    from windlass.wiring import stores

    loaded = load(config, data_dir)
    async with stores.control_store(loaded.config, may_create=False) as store:
        story = await explain_name(store, what)
    if as_json:
        print_json({"answer": story.answer, "history": [{"at": at, "what": text} for at, text in story.history]})
        return
    for sentence in story.answer:
        print(printable(sentence))
    if story.history:
        print()
    for at, text in story.history:
        print(f"{at:%Y-%m-%d %H:%M:%S}  {printable(text)}")


@command
async def replay(
    cycle: Annotated[
        int, typer.Argument(help="A cycle's id, as `windlass explain FLEET` shows it.", min=1, max=MAX_CYCLE_ID)
    ],
    with_config: Annotated[
        Path | None, typer.Option("--with", help="Decide with the fleet as this file has it.", metavar="FILE")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Decide with this setting of the fleet: max_workers=3.", metavar="NAME=VALUE"),
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> int:
    """Decide again from what a cycle saw. With the same settings it must come to the same; exit code 1 if not."""
    from windlass.config_loader import load_config
    from windlass.model.action import actions_to_plain
    from windlass.model.fleet import with_changes
    from windlass.policy.plan import plan
    from windlass.wiring import stores

    async with stores.control_store(load(config, data_dir).config, may_create=False) as store:
        stored = await store.cycle(cycle)
    if stored is None:
        raise BadInput(
            f"there is no cycle {cycle}: only those of the last days are kept; see `windlass explain FLEET`."
        )
    fleet = stored.snapshot.settings
    if with_config is not None:
        fleets = load_config(with_config, {"data_dir": data_dir}, file_named_by="--with").config.fleets
        if stored.cycle.fleet not in fleets:
            raise BadInput(f"{with_config} has no fleet {stored.cycle.fleet}, which cycle {cycle} belongs to.")
        fleet = fleets[stored.cycle.fleet]
    if fleet is None:
        raise BadInput(f"cycle {cycle} was stored without its settings: name a file with --with.")
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
        _print_plan("decided then", stored.cycle.decision, then)
        if is_same:
            print("decided again: the same")
        else:
            _print_plan("decided again", again.decision, now)
    return 0 if is_same or with_config is not None or changes else 1


def _print_plan(title: str, decision: str, actions: list[dict[str, Any]]) -> None:
    print(f"{title}: {printable(decision)}")
    for action in actions:
        details = {key: value for key, value in action.items() if key not in ("kind", "reason") and value is not None}
        print(f"  {action['kind']:<12} {json.dumps(details)}  {printable(action.get('reason', ''))}")
