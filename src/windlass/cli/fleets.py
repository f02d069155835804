"""`windlass spawn`, `terminate`, `pause`, `resume` and `restart`: operations on fleets and workers.

A fleet is given as an argument or with --fleet. Operations change the database; the next cycle executes them.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from windlass import operations
from windlass.cli.options import AsJson, ConfigFile, DataDir, load, person_command
from windlass.cli.output import print_json
from windlass.config_loader import Loaded
from windlass.model.errors import BadInput
from windlass.model.event import check_reason
from windlass.model.worker import MAX_COUNT
from windlass.operations import TERMINATE_REASON, OperationResult, OperationStore
from windlass.wiring import stores

OneFleet = Annotated[
    str | None, typer.Argument(help="Name of the fleet (default: the only running fleet).", metavar="FLEET")
]
SameFleet = Annotated[
    str | None, typer.Option("--fleet", "-f", help="Name of the fleet, as an option.", metavar="NAME")
]
Targets = Annotated[
    list[str] | None, typer.Argument(help="Ids of workers, or names of fleets.", metavar="WORKER|FLEET")
]
AllOfFleet = Annotated[str | None, typer.Option("--fleet", "-f", help="All workers of this fleet.", metavar="NAME")]
AllFleets = Annotated[bool, typer.Option("--all", help="All fleets.")]


@person_command
async def spawn(
    fleet: OneFleet = None,
    fleet_option: SameFleet = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=MAX_COUNT, help="Number of workers.", metavar="N")
    ] = 1,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Spawn workers now, whatever the scaling policy decides.

    The fleet never exceeds max_workers. Idle workers are drained later as usual.
    """
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        result = await operations.spawn_workers(store, await choose_fleet(store, fleet, fleet_option), count)
    fields = {
        "fleet": result.fleet,
        "asked": count,
        "granted": result.granted,
        "requested": result.requested,
        "max_workers": result.max_workers,
    }
    _print_results([result], fields, as_json=as_json)


@person_command
async def terminate(
    targets: Targets = None,
    fleet: AllOfFleet = None,
    force: Annotated[bool, typer.Option("--force", help="Terminate at once and requeue the running tasks.")] = False,
    reason: Annotated[str, typer.Option(help="Reason, stored with the worker.", metavar="TEXT")] = TERMINATE_REASON,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Drain workers: they finish their tasks, then terminate.

    A fleet below min_workers spawns replacements.
    """
    if not targets and not fleet:
        raise BadInput("nothing to terminate: pass ids of workers, or names of fleets.")
    check_reason(reason, "--reason")
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        ids, fleets = await _resolve(store, targets, fleet)
        results = [await operations.terminate_worker(store, one, reason, force=force) for one in ids]
        ids += [worker.id for worker in await store.workers() if worker.fleet in fleets and worker.id not in ids]
        results += [await operations.terminate_fleet_workers(store, name, reason, force=force) for name in fleets]
    changed = sum(result.changed for result in results)
    _print_results(results, {"workers": ids, "changed": changed}, as_json=as_json)


@person_command
async def pause(
    targets: Targets = None,
    fleet: AllOfFleet = None,
    all_: AllFleets = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Pause workers or fleets: no new tasks, no new workers.

    Paused workers finish their current tasks and keep running.
    """
    await _set_paused(targets, fleet, all_, load(config, data_dir), is_paused=True, as_json=as_json)


@person_command
async def resume(
    targets: Targets = None,
    fleet: AllOfFleet = None,
    all_: AllFleets = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Resume paused workers or fleets."""
    await _set_paused(targets, fleet, all_, load(config, data_dir), is_paused=False, as_json=as_json)


@person_command
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
    """Replace the workers of a fleet, and clear its failures.

    Workers drain, restart counts are cleared, failed slots become free, and a hold for failures ends. If the fleet is
    on hold because its API key belongs to another account (OTHER_ACCOUNT), the machines that the key does not list are
    abandoned.
    """
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        name = await choose_fleet(store, fleet, fleet_option)
        result = await operations.restart_fleet(store, name, slot)
    fields = {
        "fleet": name,
        "slots_freed": result.slots_freed,
        "workers": list(result.workers),
        "changed": result.changed,
    }
    _print_results([result], fields, as_json=as_json)


async def _set_paused(
    targets: list[str] | None, fleet: str | None, is_all: bool, loaded: Loaded, *, is_paused: bool, as_json: bool
) -> None:
    if sum(map(bool, (targets, fleet, is_all))) != 1:
        raise BadInput("pass exactly one of: ids of workers or names of fleets, --fleet, or --all.")
    change_worker = operations.pause_worker if is_paused else operations.resume_worker
    change_fleet = operations.pause_fleet if is_paused else operations.resume_fleet
    change_all = operations.pause_all_fleets if is_paused else operations.resume_all_fleets
    async with stores.store(loaded.config, may_create=False) as store:
        if is_all:
            fleets = [one.name for one in await store.fleets()]
            results = [await change_all(store)]
        else:
            ids, fleets = await _resolve(store, targets, fleet)
            results = [await change_worker(store, worker_id) for worker_id in ids]
            results += [await change_fleet(store, name) for name in fleets]
    fields = {"changed": sum(result.changed for result in results), "fleets": fleets, "is_paused": is_paused}
    _print_results(results, fields, as_json=as_json)


async def _resolve(store: OperationStore, targets: list[str] | None, fleet: str | None) -> tuple[list[str], list[str]]:
    """Ids of live workers, and names of fleets. Raises BadInput for a target that is neither."""
    live = {worker.id for worker in await store.workers()}
    known = [one.name for one in await store.fleets()]
    if fleet is not None:
        await check_fleet_is_known(store, fleet)
    ids = [target for target in targets or () if target in live]
    fleets = [target for target in targets or () if target not in live]
    if unknown := [target for target in fleets if target not in known]:
        raise BadInput(
            f"live worker or fleet {unknown[0]} not found; known fleets: {', '.join(known) or 'none'}. "
            "`windlass workers list` shows the workers."
        )
    return ids, list(dict.fromkeys([*fleets, *([fleet] if fleet else [])]))


async def choose_fleet(store: OperationStore, argument: str | None, option: str | None) -> str:
    """The given fleet, or the only one that has cycles. Operations report a fleet that does not exist."""
    if argument is not None and option is not None and argument != option:
        raise BadInput(f"{argument} and --fleet {option} are different fleets: pass one of them.")
    if argument or option:
        return argument or option or ""
    fleets = await store.fleets()
    # A worker that is started by hand creates its fleet. Without cycles, no workers are spawned for it.
    candidates = [one for one in fleets if one.planned_at is not None] or fleets
    if len(candidates) != 1:
        raise BadInput(f"pass the name of a fleet; known fleets: {', '.join(one.name for one in fleets) or 'none'}.")
    return candidates[0].name


async def check_fleet_is_known(store: OperationStore, fleet: str) -> None:
    known = await store.fleets()
    if fleet not in {one.name for one in known}:
        raise BadInput(f"{operations.fleet_not_found(fleet, known)}.")


def _print_results(results: Sequence[OperationResult], fields: dict[str, object], *, as_json: bool) -> None:
    """Raise BadInput for the first operation that was refused."""
    for result in results:
        if result.is_refused:
            raise BadInput(f"{result.message}.")
    if as_json:
        print_json(fields)
    for result in () if as_json else results:
        print(result.message)
