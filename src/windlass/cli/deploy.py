"""`windlass deploy`: replaces a fleet's workers, reports how far that is, or aborts it."""

import asyncio
from typing import Annotated

import typer

from windlass import rollouts
from windlass.cli.fleets import OneFleet, SameFleet, choose_fleet
from windlass.cli.options import AsJson, ConfigFile, DataDir, load, person_command
from windlass.cli.output import print_json
from windlass.model.errors import BadInput, WindlassError
from windlass.model.rollout import RolloutStatus
from windlass.model.worker import MAX_COUNT
from windlass.operations import OperationResult, OperationStore
from windlass.wiring import stores

POLL_S = 0.5
# No cycle took the request within this time: no orchestrator runs the fleet.
START_TIMEOUT_S = 120.0


class RolloutFailed(WindlassError):
    """The rollout that the command waited for did not complete."""


@person_command
async def deploy(
    fleet: OneFleet = None,
    fleet_option: SameFleet = None,
    surge: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_COUNT, help="Additional workers, within max_workers.", metavar="N"),
    ] = None,
    max_unavailable: Annotated[
        int | None, typer.Option(min=1, max=MAX_COUNT, help="Old workers that may be missing at a time.", metavar="N")
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait until the billing periods of old workers nearly end.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is complete; fail if it is not.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show the versions of the workers and the rollout.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Abort the running rollout.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Replace a fleet's workers to deploy new code or settings.

    The running `windlass up` reads windlass.toml again. New workers must finish a task, or pass a health probe, before
    old ones drain. If the new version fails, its workers drain and old workers stay. Default: one additional worker
    at a time, or one old worker at a time while no slot is free.
    """
    if sum((status, abort, bool(surge or max_unavailable or now or wait))) > 1 or (surge and max_unavailable):
        raise BadInput("pass one of --status, --abort, --surge or --max-unavailable.")
    loaded = load(config, data_dir).config
    async with stores.store(loaded, may_create=False) as store:
        name = await choose_fleet(store, fleet, fleet_option)
        result: OperationResult
        if status:
            result = await rollouts.rollout_report(store, name)
        elif abort:
            result = await rollouts.abort_deploy(store, name)
        else:
            result = requested = await rollouts.deploy_fleet(
                store,
                name,
                loaded.fleets.get(name),
                surge=surge or 0,
                max_unavailable=max_unavailable or 0,
                is_immediate=now,
            )
            if wait and not requested.is_refused:
                result = await _wait(store, name, requested.request_id)
    if result.is_refused:
        raise BadInput(f"{result.message}.")
    if as_json:
        print_json(result)
    else:
        print(result.message)


async def _wait(store: OperationStore, name: str, request_id: int) -> rollouts.RolloutReport:
    """Until the rollout has ended. Raises RolloutFailed unless it is complete."""
    begun_by = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while True:
        report = await rollouts.rollout_report(store, name)
        rollout = report.rollout
        is_known = rollout is not None and rollout.id >= request_id
        if is_known and rollout is not None and not rollout.is_running:
            if rollout.status is not RolloutStatus.COMPLETE:
                raise RolloutFailed(f"{report.message}.")
            return report
        if not is_known and asyncio.get_running_loop().time() > begun_by:
            raise RolloutFailed(f"no cycle has seen deploy {request_id} of fleet {name}: is `windlass up` running?")
        await asyncio.sleep(POLL_S)
