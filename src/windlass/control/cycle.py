"""One cycle of one fleet: observe, plan, commit, execute, record.

A crash at any point is repaired by the next cycle: decisions are committed before any provider call, and effects at the
provider are found again by listing. The number of database round trips is constant. A standby makes no provider calls.

A slow provider delays its own calls. It delays a cycle only by the listing and the volume check, which together take
less than a lease. Calls that outlast the cycle continue, and a later cycle records their outcomes.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import structlog

from windlass.control.deployment import Deployment
from windlass.control.executor import CALL_TIMEOUT_S, ProviderExecutor
from windlass.control.outcome_log import OutcomeLog
from windlass.control.provider_in_use import CLOSE_TIMEOUT_S, ProviderInUse
from windlass.control.summary import Summary, count_actions, count_refused_creations, summarize
from windlass.cost.ledger import settle
from windlass.model.action import Plan, Spawn
from windlass.model.auth import JOIN_PREFIX, SECRET_PREFIX, hash_of, new_token
from windlass.model.cycle_actions import REFUSED_CREATIONS
from windlass.model.errors import DatabaseUnavailable, WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseGuard, LeaseLost, Standby
from windlass.model.machine import Machine, MachineRequest, Volume
from windlass.model.outcome import Committed, Intent, Outcome
from windlass.model.snapshot import PlannerState, Snapshot
from windlass.model.worker import WorkerKind
from windlass.policy.boot import boot_limit
from windlass.policy.plan import plan
from windlass.ports.control import ControlStore
from windlass.ports.provider import Provider, SharesVolume

LIST_TIMEOUT_S = 60.0
# A listing may take this share of a lease. The rest is for the steps after it: otherwise a slow listing would cost this
# leader its lease, and then every later leader the same.
LIST_SHARE = 0.4
# Accounts settled per cycle. Each is due about once an hour, so few are due together; later cycles settle the rest.
MAX_SETTLED = 50
# Interval between repeated log lines while a listing fails with the same error.
LISTING_LOG_INTERVAL_S = 60.0
log = structlog.get_logger(__name__)


class FleetCycle:
    """Runs cycles of one fleet, one at a time. close() closes its provider.

    `rng` supplies the random part of worker ids and the join tokens: a system source, except in simulations.
    """

    def __init__(
        self,
        name: str,
        config: FleetConfig,
        store: ControlStore,
        provider: Provider,
        candidate: Candidate,
        rng: random.Random,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        deployment: Deployment | None = None,
    ) -> None:
        self.name = name
        self._store = store
        self._candidate = candidate
        self._rng = rng
        self._call_timeout_s = call_timeout_s
        self._deployment = deployment or Deployment()
        self._lease = LeaseGuard(candidate)
        # Set when a cycle should run before its time: on request, or because a call ended that no cycle waits for.
        self._wake = asyncio.Event()
        self._outcomes = OutcomeLog()
        self._executor = ProviderExecutor(
            provider,
            self._lease,
            self._outcomes,
            call_timeout_s=call_timeout_s,
            now=self._database_now,
            on_late_outcome=self._wake.set,
            record_at_once=self._record_at_once,
        )
        self._in_use = ProviderInUse(
            name,
            config,
            provider,
            make_provider=self._deployment.make_provider,
            on_replace=self._executor.replace_provider,
        )
        # Term and id of the last committed cycle: outcomes are recorded under it.
        self._cycle_id = 0
        # Its plan, requeued tasks and recorded outcomes: later outcomes are added to its summary.
        self._planned: tuple[Plan, int] | None = None
        self._recorded: list[Outcome] = []
        # The database's time, and the loop's time at which it was read.
        self._clock: tuple[datetime, float] | None = None
        # The database's time of the last plan of this process, and the loop's time at which it was known.
        self._last_plan: tuple[datetime, float] | None = None
        # The last listing error, and when it was logged by the loop's clock.
        self._listing_error: tuple[str, float] = ("", float("-inf"))

    async def run(
        self, call_wait_s: float | None = None, *, is_shutting_down: bool = False, is_one_shot: bool = False
    ) -> Summary:
        """Run one cycle. Raises DatabaseUnavailable; provider errors are part of the summary.

        `call_wait_s`: how long to wait for provider calls; None waits for all but preparations. Unless None, a later
        cycle or settle() must follow. `is_shutting_down`: drain every worker and spawn none. `is_one_shot`: the process
        ends after this cycle, so the gaps between cycles are the schedule of cron and not outages.
        """
        started = asyncio.get_running_loop().time()
        # Every log line of this cycle, and of the calls it starts, has the fleet and, once known, the cycle's id.
        structlog.contextvars.unbind_contextvars("cycle")
        structlog.contextvars.bind_contextvars(fleet=self.name)
        self._in_use.apply_reload()
        late = await self._record()

        observed = await self._observe(is_shutting_down=is_shutting_down, is_one_shot=is_one_shot)
        if isinstance(observed, Standby):
            self._lease.lost()
            at = observed.at.isoformat() if observed.at is not None else ""
            return Summary(
                self.name, is_leader=False, timestamp=at, standby_s=observed.expires_in_s, leader=observed.holder
            )
        term, snapshot = observed
        planned = plan(snapshot, self._in_use.config)
        try:
            committed, requests = await self._commit(term, snapshot, planned)
        except LeaseLost as error:
            self._lease.lost()
            log.warning("lost lease during cycle", fleet=self.name, error=str(error))
            return Summary(self.name, is_leader=False, timestamp=snapshot.now.isoformat(), decision=planned.decision)
        await self._executor.execute(snapshot, planned, requests, call_wait_s)
        outcomes = await self._record()

        if snapshot.is_settlement_due:
            # Several leaders may do this at the same time: the store settles each account once.
            accounts = await self._store.accounts_to_settle(self.name, MAX_SETTLED)
            await self._store.settle([settle(account, snapshot.now) for account in accounts])
        if snapshot.has_due_rows:
            await self._settle_rows()
        return summarize(
            snapshot,
            planned,
            [*late, *outcomes],
            committed,
            duration_s=asyncio.get_running_loop().time() - started,
            # Read again: what the provider refused in this cycle is reported now, because the process may end after it.
            refused_choices=self._in_use.provider.traits.refused_choices,
        )

    async def _observe(self, *, is_shutting_down: bool, is_one_shot: bool) -> Standby | tuple[int, Snapshot]:
        """The term and the snapshot, if this process leads. A standby makes no provider call."""
        loop = asyncio.get_running_loop()
        list_timeout_s = min(LIST_TIMEOUT_S, self._candidate.ttl_s * LIST_SHARE)
        if self._lease.remaining_s < list_timeout_s:
            led = await self._store.acquire_lease(self._candidate)
            if isinstance(led, Standby):
                return led
        # List machines before reading the database: a row written after the listing began is judged by a later listing.
        listing_at = loop.time()
        machines = await self._list_machines(list_timeout_s)
        observing_at = loop.time()
        observed = await self._store.observe(self._candidate, self.name, self._in_use.config)
        if isinstance(observed, Standby):
            return observed
        self._lease.renewed(observing_at)
        term, seen = observed
        self._clock = (seen.now, loop.time())
        # Time is measured from the answer of the last call to the request of this one. That is never more than what
        # has passed at the database between the two plans.
        is_last_plan_own = self._last_plan is not None and self._last_plan[0] == seen.planner_state.cadence.planned_at
        since_plan_s = observing_at - self._last_plan[1] if self._last_plan is not None and is_last_plan_own else None
        self._last_plan = self._clock
        volume, volume_problem = await self._read_volume(seen.planner_state, list_timeout_s)
        if volume is not None and volume.price_micros_per_hour is not None:
            await self._store.record_volume(self.name, volume)
        seen, config = await self._deployment.add_version(seen, self._in_use.configured, self._wake.set)
        if not self._in_use.use(config):
            seen = replace(seen, fingerprint=seen.rejected, version_settings=None, rejected=None)
        cadence = replace(seen.planner_state.cadence, gaps_s=())
        traits = self._in_use.provider.traits
        # A machine may appear this long after its intent: a creation starts while the lease is valid, then runs up to
        # the call timeout, and the provider may list the machine late.
        creation_lateness_s = traits.creation_lateness_s + self._candidate.ttl_s + self._call_timeout_s
        return term, replace(
            seen,
            machines=machines,
            volume=volume,
            volume_problem=volume_problem,
            listed_at=seen.now - timedelta(seconds=self._clock[1] - listing_at),
            since_plan_s=since_plan_s,
            traits=replace(traits, creation_lateness_s=creation_lateness_s),
            is_shutting_down=is_shutting_down,
            planner_state=seen.planner_state if is_one_shot else replace(seen.planner_state, cadence=cadence),
            preparing=self._executor.preparing,
            # Cycles are stored and shown to many readers; the environment of workers may hold secrets.
            settings=self._in_use.config.model_copy(
                update={"env": {}, "runpod": self._in_use.config.runpod.model_copy(update={"env": {}})}
            ),
        )

    async def _commit(self, term: int, snapshot: Snapshot, planned: Plan) -> tuple[Committed, list[MachineRequest]]:
        """Store the plan and reserve a slot for each spawn; the machines to create for the slots that were granted.

        Join tokens and secrets exist only in the requests. After the call they are on the machines; the database has
        hashes.
        """
        config, traits = self._in_use.config, self._in_use.provider.traits
        intents: list[Intent] = []
        tokens: dict[str, str] = {}
        secrets: dict[str, str] = {}
        for number, spawn in enumerate(action for action in planned.actions if isinstance(action, Spawn)):
            intent = Intent(
                self._new_worker_id(spawn.slot),
                spawn.slot,
                spawn.reason,
                config.heartbeat_timeout_s,
                # The first spawns fulfil requests made by hand. Requests newer than the snapshot stay open.
                is_requested=number < snapshot.requested,
                concurrency=config.concurrency,
                kind=WorkerKind.NODE if config.engine == "ray" else WorkerKind.WORKER,
                cause=spawn.cause,
                fingerprint=snapshot.fingerprint,
            )
            if traits.is_remote:
                token = tokens[intent.worker_id] = new_token(JOIN_PREFIX, self._rng)
                # The full boot time, however long the creation takes. A late machine may join within its billing unit.
                boot_s = boot_limit(config, snapshot.boots).total_s
                join_ttl_s = self._call_timeout_s + max(boot_s, traits.billing_unit_s)
                intent = replace(intent, join_token_hash=hash_of(token), join_ttl_s=join_ttl_s)
            else:
                secret = secrets[intent.worker_id] = new_token(SECRET_PREFIX, self._rng)
                intent = replace(intent, secret_hash=hash_of(secret))
            intents.append(intent)
        committed = await self._store.commit_plan(self._candidate, term, snapshot, planned, intents)
        self._cycle_id = committed.cycle_id
        self._planned, self._recorded = (planned, committed.requeued), []
        structlog.contextvars.bind_contextvars(cycle=committed.cycle_id)
        return committed, [
            MachineRequest(
                name=it.worker_id,
                fleet=self.name,
                slot=it.slot,
                join_token=tokens.get(it.worker_id),
                secret=secrets.get(it.worker_id),
            )
            for it in intents
            if it.worker_id in committed.granted
        ]

    async def _settle_rows(self) -> None:
        # Triggers of other programs run in it. None of them may stop a fleet.
        try:
            await self._store.settle_rows()
        except WindlassError as error:
            log.warning("settle rows of adopted tables failed", fleet=self.name, error=str(error))

    async def _record(self) -> list[Outcome]:
        """Record all outcomes that are known and not recorded yet. Outcomes are facts: this needs no lease.

        The summary of the last committed cycle is stored with them: what it has done so far.
        """

        async def write(outcomes: list[Outcome]) -> None:
            summary: dict[str, Any] | None = None
            if self._planned is not None:
                planned, requeued = self._planned
                known = [*self._recorded, *outcomes]
                summary = {**count_actions(planned, known, requeued)}
                if refused := count_refused_creations(known):
                    summary[REFUSED_CREATIONS] = refused
            await self._store.record_outcomes(self.name, self._cycle_id, outcomes, summary)

        recorded = await self._outcomes.record(write)
        self._recorded += recorded
        if not self._executor.is_busy:
            self._in_use.close_replaced()
        return recorded

    async def _record_at_once(self, outcome: Outcome) -> None:
        """Record one outcome in the middle of a call."""
        await self._store.record_outcomes(self.name, self._cycle_id, [outcome], None)

    # ------------------------------------------------------------------------------------------- between the cycles

    @property
    def config(self) -> FleetConfig:
        """The configuration of the next cycle."""
        return self._in_use.next_configured

    def reconfigure(self, config: FleetConfig, provider: Provider) -> None:
        """Use these from the next cycle on. A running cycle, its calls and running workers keep the old ones."""
        self._in_use.reload(config, provider)

    def wake(self) -> None:
        """End wait_for_wake()."""
        self._wake.set()

    def clear_wake(self) -> None:
        self._wake.clear()

    async def wait_for_wake(self, timeout_s: float) -> None:
        """Wait until wake() is called, a provider call ends that no cycle waits for, or the time has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def settle(self, *, includes_preparations: bool = False) -> None:
        """Wait for every call in flight and record its outcome.

        Preparations take minutes, and the next leader finds how far they are: they are awaited only on request.
        """
        await self._executor.wait_for_all(includes_preparations=includes_preparations)
        await self._record()

    def abandon(self) -> None:
        """Stop waiting for calls in flight. Requests already sent may take effect; a later cycle finds out."""
        self._executor.abandon()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close all providers. Machines keep running."""
        await self._in_use.close(timeout_s)

    # ------------------------------------------------------------------------------------------- what a cycle reads

    async def _list_machines(self, timeout_s: float) -> tuple[Machine, ...] | None:
        """None if the listing failed, whatever the error: then nothing is concluded from absence."""
        try:
            async with asyncio.timeout(timeout_s):
                machines = await self._in_use.provider.list_machines()
        except Exception as error:
            problem, now = str(error) or type(error).__name__, asyncio.get_running_loop().time()
            logged, logged_at = self._listing_error
            if problem != logged or now - logged_at >= LISTING_LOG_INTERVAL_S:
                log.warning("list machines failed", fleet=self.name, error=problem)
                self._listing_error = (problem, now)
            return None
        self._listing_error = ("", float("-inf"))
        return machines

    async def _read_volume(self, planner_state: PlannerState, timeout_s: float) -> tuple[Volume | None, str | None]:
        """The shared volume, or why it is unknown; (None, None) if no check is due in this cycle.

        Checked every `storage_check_interval_cycles`, counted over all processes, and again after a failed check.
        """
        if not isinstance(self._in_use.provider, SharesVolume):
            return None, None
        checked_in, next_cycle = planner_state.storage.checked_in_cycle, planner_state.cadence.cycle + 1
        if checked_in is not None and next_cycle - checked_in < self._in_use.config.storage_check_interval_cycles:
            return None, None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._in_use.provider.volume(), None
        except Exception as error:
            problem = str(error) or type(error).__name__
            log.warning("read volume failed", fleet=self.name, error=problem)
            return None, problem

    def _new_worker_id(self, slot: int) -> str:
        # Valid as a name of hosts, pods and processes: lower case and dashes. Never used twice.
        fleet = "".join(c if c.isalnum() else "-" for c in self.name.lower())[:40].strip("-")
        return f"{fleet}-{slot}-{self._rng.getrandbits(40):010x}"

    def _database_now(self) -> datetime | None:
        """The database's time, extrapolated from the last observation."""
        if self._clock is None:
            return None
        then, at = self._clock
        return then + timedelta(seconds=asyncio.get_running_loop().time() - at)


async def run_once(
    cycles: Sequence[FleetCycle], afterwards: Callable[[list[Summary]], Awaitable[None]] | None = None
) -> list[Summary]:
    """Run one cycle of each fleet, wait for all calls that they started, and close them, for a process that then ends.

    `afterwards` starts when all cycles have run, and is awaited together with the calls. Preparations, which take
    minutes, are awaited too, for all fleets at once. A cycle that fails does not keep the others from running: its
    error is raised at the end.
    """
    summaries: list[Summary] = []
    errors: list[Exception] = []
    try:
        for cycle in cycles:
            try:
                summaries.append(await cycle.run(is_one_shot=True))
            except DatabaseUnavailable:
                raise
            except Exception as error:
                errors.append(error)
        waiting = [cycle.settle(includes_preparations=True) for cycle in cycles]
        await asyncio.gather(*waiting, *([afterwards(summaries)] if afterwards is not None else []))
    finally:
        for cycle in cycles:
            cycle.abandon()
            await cycle.close()
    if errors:
        raise errors[0]
    return summaries
