"""`windlass spawn`, `terminate`, `pause`, `resume`, `restart`: what a person does to fleets and workers by hand.

A fleet is named as a word or with --fleet, whichever comes to mind. All of it is written into the database and carried
out by the next cycle of whoever leads.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import format_count, print_json
from windlass.model.errors import BadInput
from windlass.model.event import check_reason
from windlass.model.worker import MAX_COUNT

if TYPE_CHECKING:
    from windlass.config_loader import Loaded
    from windlass.model.cycle import Fleet as FleetRecord
    from windlass.store.control import PostgresControlStore

OneFleet = Annotated[str | None, typer.Argument(help="The fleet (default: the only one that is run).", metavar="FLEET")]
Fleet = Annotated[str | None, typer.Option("--fleet", "-f", help="All of this fleet.", metavar="NAME")]
SameFleet = Annotated[str | None, typer.Option("--fleet", "-f", help="The same, as an option.", metavar="NAME")]
Words = Annotated[list[str] | None, typer.Argument(help="Ids of workers, or names of fleets.", metavar="WORKER|FLEET")]
Everything = Annotated[bool, typer.Option("--all", help="All fleets.")]


@command
async def spawn(
    fleet: OneFleet = None,
    fleet_option: SameFleet = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=MAX_COUNT, help="How many more.", metavar="N")] = 1,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Hire workers now, whatever the policy thinks. They leave again, like any other, when they have been idle.

    Never more than the fleet has room for: what is beyond its maximum is not asked for.
    """
    from windlass.wiring import stores

    async with stores.control_store(load(config, data_dir).config, may_create=False) as store:
        chosen = await _one_fleet(store, fleet, fleet_option)
        # What was asked for before is still to come, and is no part of this.
        requested = await store.request_workers(chosen.name, count)
    granted = max(0, requested - chosen.requested_workers)
    sentence = f"asked for {granted} more in fleet {chosen.name}"
    if granted < count:
        sentence += f", not {count}: its maximum is {chosen.max_workers}, and that is all it has room for"
    answer = {
        "fleet": chosen.name,
        "asked": count,
        "granted": granted,
        "requested": requested,
        "max_workers": chosen.max_workers,
    }
    _say(answer, sentence, as_json=as_json)


@command
async def terminate(
    worker: Words = None,
    fleet: Fleet = None,
    force: Annotated[bool, typer.Option("--force", help="At once; tasks at hand go to others.")] = False,
    reason: Annotated[str, typer.Option(help="Why, for whoever asks later.", metavar="TEXT")] = "ended by hand",
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Let workers go: they finish what they have first. A fleet below its minimum hires others."""
    from windlass.wiring import stores

    if not worker and not fleet:
        raise BadInput("say which workers: their ids, or the name of a fleet.")
    check_reason(reason, "--reason")
    async with stores.control_store(load(config, data_dir).config, may_create=False) as store:
        ids, fleets = await _meant(store, worker, fleet)
        ids += [w.id for w in await store.workers() if w.fleet in fleets and w.id not in ids]
        if force:
            changed = [worker_id for worker_id in ids if await store.terminate_worker(worker_id, reason)]
            count = len(changed)
        else:
            count = await store.set_terminating(ids, reason)
    how = "ended" if force else "asked to leave"
    _say({"workers": ids, "changed": count}, f"{count} of {format_count(len(ids), 'worker')} {how}", as_json=as_json)


@command
async def pause(
    worker: Words = None,
    fleet: Fleet = None,
    all_: Everything = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Workers finish what they have and claim nothing; a paused fleet hires nobody."""
    await _set_paused(worker, fleet, all_, load(config, data_dir), is_paused=True, as_json=as_json)


@command
async def resume(
    worker: Words = None,
    fleet: Fleet = None,
    all_: Everything = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Let paused workers, or a paused fleet, go on."""
    await _set_paused(worker, fleet, all_, load(config, data_dir), is_paused=False, as_json=as_json)


@command
async def restart(
    fleet: OneFleet = None,
    fleet_option: SameFleet = None,
    slot: Annotated[
        int | None, typer.Option("--slot", min=0, max=MAX_COUNT, help="Only this slot.", metavar="N")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Say that what was broken is mended, and replace a fleet's workers by new ones, gracefully.

    Its restarts are forgotten, its failed slots are free again, and a hold for failures ends. If it is on hold because
    its key is another account's (OTHER_ACCOUNT), the machines that the key does not list are given up.
    """
    from windlass.wiring import stores

    async with stores.control_store(load(config, data_dir).config, may_create=False) as store:
        chosen = await _one_fleet(store, fleet, fleet_option)
        name = chosen.name
        freed = await store.restart_slots(name, slot)
        workers = [
            worker.id
            for worker in await store.workers()
            if worker.fleet == name and worker.slot is not None and slot in (None, worker.slot)
        ]
        count = await store.set_terminating(workers, "restarted by hand")
    sentence = (
        f"{format_count(freed, 'failed slot')} freed, {format_count(count, 'worker')} asked to leave; the next cycle hires anew"
    )
    if slot is None and chosen.hold is not None and chosen.hold.code == "OTHER_ACCOUNT":
        sentence += "; machines that its key does not list are given up: they may still be charged"
    _say({"fleet": name, "slots_freed": freed, "workers": workers, "changed": count}, sentence, as_json=as_json)


async def _set_paused(
    words: list[str] | None, fleet: str | None, is_all: bool, loaded: "Loaded", *, is_paused: bool, as_json: bool
) -> None:
    """A fleet with all its workers, those started by hand too, or single workers."""
    from windlass.wiring import stores

    if sum(map(bool, (words, fleet, is_all))) != 1:
        raise BadInput("say what is meant: ids of workers, names of fleets, or --all.")
    async with stores.control_store(loaded.config, may_create=False) as store:
        ids, fleets = await _meant(store, words, fleet) if not is_all else ([], await _all_fleets(store))
        count = await store.set_paused(ids, is_paused) if ids else 0
        for name in fleets:
            count += await store.pause_fleet(name, is_paused)
    verb = "paused" if is_paused else "resumed"
    what = [format_count(len(fleets), "fleet")] if fleets else []
    what.append(format_count(count, "worker"))
    answer = {"changed": count, "fleets": fleets, "is_paused": is_paused}
    _say(answer, f"{' and '.join(what)} {verb}", as_json=as_json)


async def _all_fleets(store: "PostgresControlStore") -> list[str]:
    return [fleet.name for fleet in await store.fleets()]


async def _meant(
    store: "PostgresControlStore", words: list[str] | None, fleet: str | None
) -> tuple[list[str], list[str]]:
    """Ids of live workers, and names of fleets. Raises BadInput for a word that is neither."""
    live = {worker.id for worker in await store.workers()}
    known = await _all_fleets(store)
    if fleet is not None:
        await check_fleet_is_known(store, fleet)
    ids = [word for word in words or () if word in live]
    fleets = [word for word in words or () if word not in live]
    if unknown := [word for word in fleets if word not in known]:
        raise BadInput(
            f"no live worker is called {unknown[0]}, and no fleet ({_names(known)}): "
            "`windlass workers list` shows the workers."
        )
    return ids, list(dict.fromkeys([*fleets, *([fleet] if fleet else [])]))


async def _one_fleet(store: "PostgresControlStore", word: str | None, option: str | None) -> "FleetRecord":
    """The one that is named, or the only one that is run. Raises BadInput for one that nobody can be hired for."""
    if word is not None and option is not None and word != option:
        raise BadInput(f"{word} and --fleet {option} name two fleets: choose one.")
    fleets = {fleet.name: fleet for fleet in await store.fleets()}
    asked = word or option
    # A worker that somebody starts by hand brings a fleet along, which no orchestrator knows of.
    is_run = [name for name, fleet in fleets.items() if fleet.planned_at is not None]
    name = asked or _only(is_run) or _only(list(fleets))
    if name is None or name not in fleets:
        what = f"there is no fleet {asked}" if asked else "say which fleet"
        raise BadInput(f"{what}: known are {_names(fleets)}.")
    if name not in is_run:
        raise BadInput(f"nobody runs fleet {name}: it has had no cycle yet; start `windlass up` with it first.")
    return fleets[name]


def _only(names: list[str]) -> str | None:
    return names[0] if len(names) == 1 else None


async def check_fleet_is_known(store: "PostgresControlStore", fleet: str) -> None:
    """Raise BadInput with the known ones unless a cycle has seen this fleet, or a worker says it is of it."""
    known = await _all_fleets(store)
    if fleet not in known:
        raise BadInput(f"there is no fleet {fleet}: known are {_names(known)}.")


def _names(fleets: "dict[str, FleetRecord] | list[str]") -> str:
    return ", ".join(sorted(fleets)) or "none yet; `windlass up` makes them"


def _say(plain: dict[str, object], sentence: str, *, as_json: bool) -> None:
    if as_json:
        print_json(plain)
    else:
        print(sentence)
