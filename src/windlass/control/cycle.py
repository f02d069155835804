"""One cycle of one fleet: list machines, observe, plan, commit, act, record, and close the accounts that are due.

A crash at any point is repaired by the next cycle: what was decided is committed before any provider is called, and
what a provider did is found again by listing. The database is asked a constant number of times. Whoever does not lead
asks the provider nothing. A provider that is slow delays what was asked of it, and a cycle only until its list, or what
its volume holds, is unknown: less than a lease.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import structlog

from windlass.control.executor import CALL_TIMEOUT_S, ProviderExecutor
from windlass.control.summary import (
    Summary,
    alerts_of,
    count_actions,
    count_calls,
    count_machines,
    count_status,
    failures_of,
)
from windlass.cost.ledger import settle
from windlass.model.action import Delete, Plan, Spawn
from windlass.model.auth import JOIN_PREFIX, hash_of, new_token
from windlass.model.errors import DatabaseUnavailable
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate, LeaseGuard, LeaseLost, Standby
from windlass.model.machine import Machine, ProviderTraits, Volume
from windlass.model.outcome import Deleted, Intent, Outcome
from windlass.model.snapshot import PlannerState, Snapshot
from windlass.policy.plan import plan
from windlass.ports.control import ControlStore
from windlass.ports.provider import Provider, SharesVolume

LIST_TIMEOUT_S = 60.0
# Of a lease, what a list may take: the rest is for what follows it, or a slow list would cost us the lead, and whoever
# leads next the same.
LIST_SHARE = 0.4
# A cycle of many waits this long for what it began; the rest is the next one's to write down. Well below a lease.
PATIENCE_S = 5.0
# Longer than a provider needs that looks for what its machines left behind, one request a second.
CLOSE_TIMEOUT_S = 20.0
# Accounts closed in one cycle. Each is due about once an hour, so this is far more than come at the same time; and what
# is left is the next cycle's.
MAX_SETTLED = 50
# The same trouble with a list is said once, and then this often.
UNLISTED_TOLD_S = 60.0
log = structlog.get_logger(__name__)


class FleetCycle:
    """Runs cycles of one fleet, one after another. The provider is its own: close() closes it.

    `rng` gives the random part of worker ids, and join tokens: the system's source of chance, but in simulations.
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
    ) -> None:
        self.name = name
        self._config = config
        self._store = store
        self._provider = provider
        self._candidate = candidate
        self._rng = rng
        self._call_timeout_s = call_timeout_s
        self._trust = LeaseGuard(candidate)
        # Told when a call ends that no cycle waits for any more: the next one has something to write down.
        self.on_settled: Callable[[], None] = lambda: None
        self._actor = ProviderExecutor(
            provider, self._trust, call_timeout_s, self._settled, self._now, write_down=self._write_down
        )
        # What is taken over when the next cycle begins.
        self._changes: tuple[FleetConfig, Provider] | None = None
        # Providers that were exchanged while calls of theirs were under way.
        self._formerly: list[Provider] = []
        self._closing: set[asyncio.Task[None]] = set()
        # Term and id of the cycle whose outcomes are still to be written down.
        self._last = (0, 0)
        # The database's time, and when it was so by the loop's clock.
        self._clock: tuple[datetime, float] | None = None
        # Why the last list could not be had, and when that was said, by the loop's clock.
        self._unlisted: tuple[str, float] | None = None
        # The fleet is to end: everybody is let go and nobody hired, whatever waits.
        self.is_shutting_down = False
        # One of many programs that end after it: how far apart they are is the pace. A gap of our own is an outage.
        self.is_single = False

    def _now(self) -> datetime | None:
        """The database's time, reckoned from when it was last read."""
        if self._clock is None:
            return None
        then, at = self._clock
        return then + timedelta(seconds=asyncio.get_running_loop().time() - at)

    def _settled(self) -> None:
        self.on_settled()

    @property
    def config(self) -> FleetConfig:
        """As it is from the next cycle on."""
        return self._config if self._changes is None else self._changes[0]

    def reconfigure(self, config: FleetConfig, provider: Provider) -> None:
        """From the next cycle on: what one has begun it carries out with those it began with. Workers that run keep
        what they were started with."""
        if self._changes is not None:
            self._formerly.append(self._changes[1])
        self._changes = config, provider

    def _take_changes_over(self) -> None:
        if self._changes is None:
            return
        self._formerly.append(self._provider)
        (self._config, self._provider), self._changes = self._changes, None
        self._actor.exchange_provider(self._provider)

    async def settle(self, *, is_patient_with_all: bool = False) -> None:
        """Wait for every call that is under way and write down what became of it. Not for preparations, unless asked
        to: whoever leads next finds how far they have come."""
        await self._write_down_late(None, is_patient_with_all=is_patient_with_all)

    def abandon(self) -> None:
        """Stop waiting for calls under way. What was sent may still happen; a later cycle finds out."""
        self._actor.abandon()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Its providers are needed no more. Machines go on."""
        self._take_changes_over()
        for provider in (*self._formerly, self._provider):
            self._begin_to_close(provider)
        _, late = await asyncio.wait(self._closing, timeout=timeout_s)
        for closing in late:
            closing.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _begin_to_close(self, provider: Provider) -> None:
        self._closing = {task for task in self._closing if not task.done()}
        self._closing.add(asyncio.create_task(self._close(provider)))

    async def _close(self, provider: Provider) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await provider.close()
        except Exception as error:
            log.warning("provider not closed", fleet=self.name, error=str(error) or type(error).__name__)

    async def run(self, patience_s: float | None = None) -> Summary:
        """One cycle. Raises DatabaseUnavailable; whatever a provider does is part of the summary.

        `patience_s`: how long to wait for what was asked of the provider; a later cycle, or settle(), must then follow.
        """
        started = asyncio.get_running_loop().time()
        # In every line of this cycle, and of the calls it begins.
        structlog.contextvars.unbind_contextvars("cycle")
        structlog.contextvars.bind_contextvars(fleet=self.name)
        self._take_changes_over()
        late = await self._write_down_late(0.0)
        observed = await self._observe()
        if isinstance(observed, Standby):
            return self._stand_by(observed)
        term, snapshot = observed
        decided = plan(snapshot, self._config)
        try:
            cycle_id, outcomes, requeued = await self._carry_out(term, snapshot, decided, patience_s)
        except LeaseLost as error:
            self._trust.lost()
            log.warning("lead lost in the middle of a cycle", fleet=self.name, error=str(error))
            return Summary(self.name, is_leader=False, timestamp=snapshot.now.isoformat(), decision=decided.decision)
        if snapshot.is_settlement_due:
            await self._settle_accounts(snapshot.now)
        return Summary(
            fleet=self.name,
            is_leader=True,
            timestamp=snapshot.now.isoformat(),
            decision=decided.decision,
            hold=decided.hold.reason if decided.hold is not None else None,
            cycle_id=cycle_id,
            duration_s=asyncio.get_running_loop().time() - started,
            actions=count_actions(decided, [*late, *outcomes], requeued),
            status=count_status(snapshot),
            hired=sum(worker.slot is not None for worker in snapshot.workers),
            machines=count_machines(snapshot),
            failures=failures_of(decided, [*late, *outcomes]),
            # Asked again: what was refused in this cycle is told of now, by one that may be the last of its process.
            refused_choices=self._provider.traits.refused_choices,
            alerts=alerts_of(decided),
            provider_calls=count_calls(snapshot.machines is not None, [*late, *outcomes]),
        )

    async def _observe(self) -> Standby | tuple[int, Snapshot]:
        """Our term and all that is known, if we lead. Whoever does not asks the provider nothing."""
        loop = asyncio.get_running_loop()
        if self._trust.remaining_s < self._list_timeout_s:
            led = await self._store.acquire_lease(self._candidate)
            if isinstance(led, Standby):
                return led
        # Machines first: what is written down after this list was asked for is judged by a later one.
        listing = loop.time()
        machines = await self._list_machines()
        observing = loop.time()
        observed = await self._store.observe(self._candidate, self.name, self._config)
        if isinstance(observed, Standby):
            return observed
        self._trust.renewed(observing)
        term, seen = observed
        self._clock = (seen.now, loop.time())
        volume, volume_problem = await self._look_at_volume(seen.planner_state)
        cadence = replace(seen.planner_state.cadence, gaps_s=())
        return term, replace(
            seen,
            machines=machines,
            volume=volume,
            volume_problem=volume_problem,
            listed_at=seen.now - timedelta(seconds=self._clock[1] - listing),
            traits=self._traits(),
            is_shutting_down=self.is_shutting_down,
            planner_state=seen.planner_state if self.is_single else replace(seen.planner_state, cadence=cadence),
            preparing=self._actor.preparing,
            # What is stored with the cycle is read by many: the environment of workers may hold secrets.
            settings=self._config.model_copy(
                update={"env": {}, "runpod": self._config.runpod.model_copy(update={"env": {}})}
            ),
        )

    async def _settle_accounts(self, now: datetime) -> None:
        """Whoever else does the same at the same time does no harm: an account is closed once."""
        accounts = await self._store.accounts_to_settle(self.name, MAX_SETTLED)
        await self._store.settle([settle(account, now) for account in accounts])

    def _stand_by(self, standby: Standby) -> Summary:
        self._trust.lost()
        at = standby.at.isoformat() if standby.at is not None else ""
        return Summary(self.name, is_leader=False, timestamp=at, standby_s=standby.expires_in_s)

    def _traits(self) -> ProviderTraits:
        """The provider's, with its lateness counted from the intent: the call itself is made while we trust our lease,
        and takes its time. Until all that has passed, a machine may appear for an intent that has no answer."""
        traits = self._provider.traits
        call_s = self._candidate.ttl_s + self._call_timeout_s
        return replace(traits, creation_lateness_s=traits.creation_lateness_s + call_s)

    async def _write_down_late(self, patience_s: float | None, *, is_patient_with_all: bool = False) -> list[Outcome]:
        """What became of calls that outlasted their cycle: facts, so we need not lead."""
        late = await self._actor.outcomes(patience_s, is_patient_with_all=is_patient_with_all)
        if late:
            term, cycle_id = self._last
            await self._store.commit_outcomes(self._candidate, term, self.name, cycle_id, late, [], None)
            self._actor.forget(late)
        if self._formerly and not self._actor.is_busy:
            former, self._formerly = self._formerly, []
            for provider in former:
                self._begin_to_close(provider)
        return late

    async def _write_down(self, outcome: Outcome) -> None:
        """At once: a fact, so we need not lead."""
        term, cycle_id = self._last
        await self._store.commit_outcomes(self._candidate, term, self.name, cycle_id, [outcome], [], None)

    async def _carry_out(
        self, term: int, snapshot: Snapshot, decided: Plan, patience_s: float | None
    ) -> tuple[int, list[Outcome], int]:
        store, candidate, actor = self._store, self._candidate, self._actor
        now_free, freed_later, join_tokens = self._intents(snapshot, decided)
        committed = await store.commit_plan(candidate, term, snapshot, decided, now_free)
        self._last = (term, committed.cycle_id)
        structlog.contextvars.bind_contextvars(cycle=committed.cycle_id)
        actor.end_machines(snapshot, decided)
        actor.create_machines(self.name, now_free, committed.granted, join_tokens)
        actor.prepare_machines(snapshot, decided)
        actor.grow_volumes(decided)
        outcomes = await actor.outcomes(patience_s)
        gone = {outcome.worker_id for outcome in outcomes if isinstance(outcome, Deleted)}
        replacements = [intent for worker_id, intent in freed_later if worker_id in gone]
        if not outcomes:
            return committed.cycle_id, [], committed.requeued
        summary = count_actions(decided, outcomes, committed.requeued)
        try:
            granted = await store.commit_outcomes(
                candidate, term, self.name, committed.cycle_id, outcomes, replacements, summary
            )
        except LeaseLost:
            actor.forget(outcomes)
            raise
        actor.forget(outcomes)
        actor.create_machines(self.name, replacements, granted, join_tokens)
        created = await actor.outcomes(patience_s) if granted else []
        if created:
            outcomes += created
            summary = count_actions(decided, outcomes, committed.requeued)
            await store.commit_outcomes(candidate, term, self.name, committed.cycle_id, created, [], summary)
            actor.forget(created)
        return committed.cycle_id, outcomes, committed.requeued

    def _intents(
        self, snapshot: Snapshot, decided: Plan
    ) -> tuple[list[Intent], list[tuple[str, Intent]], dict[str, str]]:
        """Hirings into slots that are free, those that must wait until their slot's last worker is gone, join tokens.

        The tokens live as long as this cycle: after it they are on the machines, and we know only their hashes.
        """
        deleted = {action.worker_id for action in decided.actions if isinstance(action, Delete)}
        holders = {worker.slot: worker.id for worker in snapshot.workers if worker.id in deleted}
        now_free: list[Intent] = []
        freed_later: list[tuple[str, Intent]] = []
        join_tokens: dict[str, str] = {}
        spawns = (action for action in decided.actions if isinstance(action, Spawn))
        for number, action in enumerate(spawns):
            # The first ones are for whoever asked by hand; what was asked for since the snapshot is still to come.
            intent = Intent(
                self._new_id(action.slot),
                action.slot,
                action.reason,
                self._config.heartbeat_timeout_s,
                is_requested=number < snapshot.requested,
            )
            if self._provider.traits.is_remote:
                token = join_tokens[intent.worker_id] = new_token(JOIN_PREFIX, self._rng)
                # Its machine has all its time to boot, however long it took to be made.
                join_ttl_s = self._call_timeout_s + self._config.spawn_timeout_s
                intent = replace(intent, join_token_hash=hash_of(token), join_ttl_s=join_ttl_s)
            if action.slot in holders:
                freed_later.append((holders[action.slot], intent))
            else:
                now_free.append(intent)
        return now_free, freed_later, join_tokens

    def _new_id(self, slot: int) -> str:
        # A name for hosts, pods and processes alike: lower case, dashes, never used twice.
        fleet = "".join(c if c.isalnum() else "-" for c in self.name.lower())[:40].strip("-")
        return f"{fleet}-{slot}-{self._rng.getrandbits(40):010x}"

    @property
    def _list_timeout_s(self) -> float:
        return min(LIST_TIMEOUT_S, self._candidate.ttl_s * LIST_SHARE)

    async def _list_machines(self) -> tuple[Machine, ...] | None:
        try:
            async with asyncio.timeout(self._list_timeout_s):
                machines = await self._provider.list_machines()
        except Exception as error:
            # Whatever went wrong, the list is not known: an error nobody foresaw is no reason to conclude anything.
            self._tell_of_no_list(str(error) or type(error).__name__)
            return None
        self._unlisted = None
        return machines

    def _tell_of_no_list(self, problem: str) -> None:
        now = asyncio.get_running_loop().time()
        told, told_at = self._unlisted or ("", float("-inf"))
        if problem != told or now - told_at >= UNLISTED_TOLD_S:
            log.warning("machines unknown", fleet=self.name, error=problem)
            self._unlisted = (problem, now)

    async def _look_at_volume(self, planner_state: PlannerState) -> tuple[Volume | None, str | None]:
        """In every so many cycles, whoever ran the last ones; and why it cannot be known. What cannot is looked at
        again in the next one."""
        if not isinstance(self._provider, SharesVolume):
            return None, None
        looked_in = planner_state.storage.checked_in_cycle
        if (
            looked_in is not None
            and planner_state.cadence.cycle + 1 - looked_in < self._config.storage_check_interval_cycles
        ):
            return None, None
        try:
            async with asyncio.timeout(self._list_timeout_s):
                return await self._provider.volume(), None
        except Exception as error:
            problem = str(error) or type(error).__name__
            log.warning("volume unknown", fleet=self.name, error=problem)
            return None, problem


async def run_once(
    cycles: Sequence[FleetCycle], meanwhile: Callable[[list[Summary]], Awaitable[None]] | None = None
) -> list[Summary]:
    """One cycle of each, and the end of all that they began, for whoever goes away afterwards. Closes them.

    `meanwhile` is begun when all have had their cycle, and is over too when this is.

    Preparations take minutes, and nobody else is there to hear of their end; but no fleet waits for another's, and none
    goes without its cycle because another's failed: that is raised when all have had theirs.
    """
    summaries: list[Summary] = []
    problems: list[Exception] = []
    try:
        for cycle in cycles:
            cycle.is_single = True
            try:
                summaries.append(await cycle.run())
            except DatabaseUnavailable:
                raise
            except Exception as error:
                problems.append(error)
        waiting = [cycle.settle(is_patient_with_all=True) for cycle in cycles]
        await asyncio.gather(*waiting, *([meanwhile(summaries)] if meanwhile is not None else []))
    finally:
        for cycle in cycles:
            cycle.abandon()
            await cycle.close()
    if problems:
        raise problems[0]
    return summaries
