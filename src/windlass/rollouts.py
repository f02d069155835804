"""Operations on rollouts: start one, abort it, and report how far it is.

Like in operations.py, each operation is one function over the store's ports, and the API, the dashboard and the command
line format its result. The next cycles execute it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from windlass.model.cycle import Fleet
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.plural import plural
from windlass.model.rollout import Rollout
from windlass.model.worker import MAX_COUNT, Worker, WorkerStatus
from windlass.operations import OperationOutcome, OperationResult, OperationStore, find_fleet

# Windlass does not run the machines of such a fleet, so it cannot replace them.
FOREIGN_CLUSTER = "runs on a Ray cluster that Windlass does not manage: deploy its code with that cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployResult(OperationResult):
    """`changed`: workers that are not on the current version, as far as the last cycle knew it."""

    fleet: str
    # Id of the request, and of its rollout. 0 if it was refused.
    request_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport(OperationResult):
    """`changed`: workers on an old version, of `workers` that were spawned and do not drain."""

    fleet: str
    # Version of the current code and settings. None: no cycle has read them.
    fingerprint: str | None = None
    workers: int = 0
    # None: the fleet has had none.
    rollout: Rollout | None = None


def count_versions(fleet: Fleet, workers: Iterable[Worker]) -> tuple[int, int]:
    """Workers on an old version, and all. Workers that drain, or that a person started, do not count."""
    staying = (WorkerStatus.SPAWNING, WorkerStatus.ACTIVE)
    own = [each for each in workers if each.fleet == fleet.name and each.slot is not None and each.status in staying]
    if fleet.fingerprint is None:
        return 0, len(own)
    return sum(worker.fingerprint != fleet.fingerprint for worker in own), len(own)


def versions_text(old: int, total: int) -> str:
    return f"{old} of {total} on the old version" if old else f"all {total} on the current version"


async def deploy_fleet(
    store: OperationStore,
    name: str,
    settings: FleetConfig | None,
    *,
    surge: int = 0,
    max_unavailable: int = 0,
    is_immediate: bool = False,
) -> DeployResult:
    """Replace all workers by workers of the fleet's current code and settings, a few at a time.

    `settings`: of the fleet, if the caller's configuration has it. At most one of `surge` and `max_unavailable` is
    given. Raises BadInput for numbers that no fleet could use.
    """
    if surge and max_unavailable:
        raise BadInput("surge and max_unavailable exclude each other: pass one of them.")
    if not 0 <= surge <= MAX_COUNT or not 0 <= max_unavailable <= MAX_COUNT:
        raise BadInput(f"surge and max_unavailable are numbers from 1 to {MAX_COUNT}.")
    # Such a fleet has no cycles, so the database does not know its provider.
    if settings is not None and settings.provider == "ray":
        return DeployResult(outcome=OperationOutcome.CONFLICT, message=f"fleet {name} {FOREIGN_CLUSTER}", fleet=name)
    fleet = await find_fleet(store, name, has_cycles=True)
    if isinstance(fleet, OperationResult):
        return DeployResult(outcome=fleet.outcome, message=fleet.message, fleet=name)
    if max(surge, max_unavailable) > fleet.max_workers:
        raise BadInput(f"fleet {name} has at most {fleet.max_workers} workers: pass a smaller number.")
    old, total = count_versions(fleet, await store.workers())
    request_id = await store.request_deploy(name, surge, max_unavailable, is_immediate=is_immediate)
    message = f"deploy {request_id} of fleet {name} requested for {plural(total, 'worker')}"
    return DeployResult(outcome=OperationOutcome.DONE, message=message, changed=old, fleet=name, request_id=request_id)


async def abort_deploy(store: OperationStore, name: str) -> DeployResult:
    """Abort the fleet's rollout. Additional workers of the new version drain; the others stay."""
    report = await rollout_report(store, name)
    if report.is_refused:
        return DeployResult(outcome=report.outcome, message=report.message, fleet=name)
    if not await store.abort_deploy(name):
        return DeployResult(
            outcome=OperationOutcome.UNCHANGED, message=f"fleet {name} has no rollout to abort", fleet=name
        )
    is_over = report.rollout is not None and not report.rollout.is_running
    message = f"rollout of fleet {name} {'has ended already' if is_over else 'is aborted'}"
    outcome = OperationOutcome.UNCHANGED if is_over else OperationOutcome.DONE
    return DeployResult(outcome=outcome, message=message, fleet=name)


async def rollout_report(store: OperationStore, name: str) -> RolloutReport:
    """The versions of the fleet's workers, and its running or last rollout."""
    fleet = await find_fleet(store, name)
    if isinstance(fleet, OperationResult):
        return RolloutReport(outcome=fleet.outcome, message=fleet.message, fleet=name)
    old, total = count_versions(fleet, await store.workers())
    parts = [f"fleet {name}: {versions_text(old, total)} ({fleet.fingerprint or 'unknown'})"]
    rollout = fleet.rollout
    if rollout is not None:
        because = f": {rollout.reason}" if rollout.reason else ""
        if rollout.changes:
            because += f"; changed: {', '.join(rollout.changes)}"
        parts.append(f"rollout of {rollout.target} {rollout.status.replace('_', ' ')}{because}")
    return RolloutReport(
        outcome=OperationOutcome.DONE,
        message="; ".join(parts),
        changed=old,
        fleet=name,
        fingerprint=fleet.fingerprint,
        workers=total,
        rollout=rollout,
    )
