"""Rows of fleets, slots and leases."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from support.memory_store.interval import interval
from windlass.model.cycle import Fleet
from windlass.model.fleet import MAX_RESTARTS
from windlass.model.lease import Candidate, LeaseLost, Standby
from windlass.model.rollout import DeployRequest
from windlass.model.snapshot import PlannerState


@dataclass(slots=True)
class SlotRow:
    is_failed: bool = False
    restarts: list[datetime] = field(default_factory=list)
    # Its last worker failed: the next one replaces it.
    needs_replacement: bool = False

    def record_restart(self, now: datetime) -> None:
        self.needs_replacement = True
        self.restarts = [*self.restarts, now][-MAX_RESTARTS:]


@dataclass(slots=True)
class FleetRow:
    name: str
    created_at: datetime
    provider: str = "local"
    queues: tuple[str, ...] = ()
    min_workers: int = 0
    max_workers: int = 10
    is_paused: bool = False
    requested_workers: int = 0
    reset_at: datetime | None = None
    restarted_at: datetime | None = None
    deploy: DeployRequest | None = None
    planner_state: PlannerState = field(default_factory=PlannerState)
    slots: dict[int, SlotRow] = field(default_factory=dict)

    def as_fleet(self, *, is_led: bool) -> Fleet:
        return Fleet(
            name=self.name,
            provider=self.provider,
            queues=self.queues,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            is_paused=self.is_paused,
            requested_workers=self.requested_workers,
            hold=self.planner_state.hold,
            failed_slots=tuple(number for number, slot in sorted(self.slots.items()) if slot.is_failed),
            created_at=self.created_at,
            planned_at=self.planner_state.cadence.planned_at,
            next_plan_in_s=self.planner_state.cadence.next_plan_in_s,
            is_led=is_led,
            fingerprint=self.planner_state.fingerprint,
            rollout=self.planner_state.rollout,
        )


@dataclass(slots=True)
class LeaseRow:
    holder: str
    term: int
    expires_at: datetime
    ttl_s: float

    def shorten(self, now: datetime) -> None:
        """A lease that ends later than its ttl_s from now was written before the clock was set back."""
        self.expires_at = min(self.expires_at, now + interval(self.ttl_s))


class LeaseTable:
    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self.rows: dict[str, LeaseRow] = {}

    def acquire(self, candidate: Candidate) -> int | Standby:
        now = self._clock()
        lease = self.rows.get(candidate.lease)
        if lease is None:
            lease = self.rows[candidate.lease] = LeaseRow(candidate.holder, 1, now, candidate.ttl_s)
        elif lease.holder != candidate.holder:
            lease.shorten(now)
            if lease.expires_at > now:
                return Standby((lease.expires_at - now).total_seconds(), now, lease.holder)
            lease.holder = candidate.holder
            lease.term += 1
        lease.expires_at, lease.ttl_s = now + interval(candidate.ttl_s), candidate.ttl_s
        return lease.term

    def release(self, candidate: Candidate) -> None:
        lease = self.rows.get(candidate.lease)
        if lease is not None and lease.holder == candidate.holder:
            lease.expires_at = self._clock()

    def require(self, candidate: Candidate, term: int) -> None:
        lease = self.rows.get(candidate.lease)
        is_held = lease is not None and (lease.holder, lease.term) == (candidate.holder, term)
        if lease is None or not is_held or lease.expires_at <= self._clock():
            raise LeaseLost(f"lease {candidate.lease} with term {term} is no longer held by {candidate.holder}")

    def is_held(self, name: str) -> bool:
        lease, now = self.rows.get(name), self._clock()
        return lease is not None and now < lease.expires_at <= now + interval(lease.ttl_s)

    def has_leader(self) -> bool:
        return any(self.is_held(name) for name in self.rows if not name.startswith("ray:"))

    def leaderless_s(self) -> float:
        """Seconds without an orchestrator lease; negative while one is held. Leases of dispatchers do not count."""
        expiries = [lease.expires_at for name, lease in self.rows.items() if not name.startswith("ray:")]
        return (self._clock() - max(expiries)).total_seconds() if expiries else float("inf")
