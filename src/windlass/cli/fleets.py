"""`windlass spawn`, `terminate`, `pause`, `resume`, `restart`: what a person does to fleets and workers by hand.

All of it is written into the database and carried out by the next cycle of whoever leads.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json
from windlass.model.errors import BadInput
from windlass.model.worker import DEFAULT_FLEET

if TYPE_CHECKING:
    from windlass.configure import Loaded
    from windlass.store.control import PostgresControlStore

Fleet = Annotated[str | None, typer.Option("--fleet", "-f", help="All of this fleet.", metavar="NAME")]
WorkerIds = Annotated[list[str] | None, typer.Argument(help="Ids of workers.", metavar="WORKER")]
Everything = Annotated[bool, typer.Option("--all", help="All fleets.")]


@command
async def spawn(
    fleet: Annotated[str, typer.Argument(help="The fleet to hire for.", metavar="FLEET")] = DEFAULT_FLEET,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many more.")] = 1,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Hire workers now, whatever the policy thinks. Idle ones leave again as any other."""
    from windlass import wire

    async with wire.control_store(load(config, data_dir).config) as store:
        requested = await store.request_workers(fleet, count)
    _say({"fleet": fleet, "requested": requested}, f"asked for {requested} more in fleet {fleet}", as_json=as_json)


@command
async def terminate(
    worker: WorkerIds = None,
    fleet: Fleet = None,
    force: Annotated[bool, typer.Option("--force", help="At once; tasks at hand go to others.")] = False,
    reason: Annotated[str, typer.Option(help="Why, for whoever asks later.")] = "ended by hand",
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Let workers go: they finish what they have first. A fleet below its minimum hires others."""
    from windlass import wire

    async with wire.control_store(load(config, data_dir).config) as store:
        ids = await _chosen(store, worker, fleet)
        if force:
            changed = [worker_id for worker_id in ids if await store.end_worker(worker_id, reason)]
            count = len(changed)
        else:
            count = await store.set_terminating(ids, reason)
    how = "ended" if force else "asked to leave"
    _say({"workers": ids, "changed": count}, f"{count} of {len(ids)} workers {how}", as_json=as_json)


@command
async def pause(
    worker: WorkerIds = None,
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
    worker: WorkerIds = None,
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
    fleet: Annotated[str, typer.Argument(help="The fleet.", metavar="FLEET")] = DEFAULT_FLEET,
    slot: Annotated[int | None, typer.Option("--slot", min=0, help="Only this slot.")] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Forget a fleet's restarts, free its failed slots, and replace its workers by new ones, gracefully."""
    from windlass import wire

    async with wire.control_store(load(config, data_dir).config) as store:
        freed = await store.restart_slots(fleet, slot)
        workers = [
            worker.id
            for worker in await store.workers()
            if worker.fleet == fleet and worker.slot is not None and slot in (None, worker.slot)
        ]
        count = await store.set_terminating(workers, "restarted by hand")
    _say(
        {"fleet": fleet, "slots_freed": freed, "workers": workers, "changed": count},
        f"{freed} failed slots freed, {count} workers asked to leave; the next cycle hires others",
        as_json=as_json,
    )


async def _set_paused(
    ids: list[str] | None, fleet: str | None, is_all: bool, loaded: "Loaded", *, is_paused: bool, as_json: bool
) -> None:
    from windlass import wire

    if sum(map(bool, (ids, fleet, is_all))) != 1:
        raise BadInput("say what is meant: ids of workers, --fleet NAME, or --all.")
    async with wire.control_store(loaded.config) as store:
        if ids:
            count = await store.set_paused(await _chosen(store, ids, None), is_paused)
        else:
            names = [fleet] if fleet else [known.name for known in await store.fleets()]
            count = sum([await store.pause_fleet(name, is_paused) for name in names])
    verb = "paused" if is_paused else "resumed"
    _say({"changed": count, "is_paused": is_paused}, f"{count} workers {verb}", as_json=as_json)


async def _chosen(store: "PostgresControlStore", ids: list[str] | None, fleet: str | None) -> list[str]:
    """Live workers, by id or by fleet. Raises BadInput for one that is not there."""
    if bool(ids) == bool(fleet):
        raise BadInput("say which workers: their ids, or --fleet NAME.")
    workers = await store.workers()
    if fleet:
        await check_fleet_is_known(store, fleet)
        return [worker.id for worker in workers if worker.fleet == fleet]
    live = {worker.id for worker in workers}
    unknown = [worker_id for worker_id in ids or () if worker_id not in live]
    if unknown:
        raise BadInput(f"no live worker is called {unknown[0]}: `windlass workers list` shows them.")
    return list(ids or ())


async def check_fleet_is_known(store: "PostgresControlStore", fleet: str) -> None:
    """Raise BadInput with the known ones unless a cycle has seen this fleet, or a worker says it is of it."""
    known = {known.name for known in await store.fleets()} | {worker.fleet for worker in await store.workers()}
    if fleet not in known:
        raise BadInput(f"there is no fleet {fleet}: known are {', '.join(sorted(known)) or 'none yet'}.")


def _say(plain: dict[str, object], sentence: str, *, as_json: bool) -> None:
    if as_json:
        print_json(plain)
    else:
        print(sentence)
