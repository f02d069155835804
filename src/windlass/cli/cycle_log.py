"""The log of `windlass up`: changes of workers, each cycle that acted or changed its kind of decision, and what to do
next once the first cycle is done. A standby does not claim to serve its queues."""

from collections.abc import Mapping
from typing import Any

from windlass.cli.logs import get_logger
from windlass.control.summary import Summary
from windlass.model.config import Config

MAX_FLEETS_NAMED = 5
# A second start in another folder uses the same database, and its fleets run only after the first ends.
STANDBY_STEP = (
    "this database has a leader, and only its fleets run; "
    "to run these too, add them to its windlass.toml, or give them another database (--data-dir FOLDER)"
)
# Workers that have become active. Failed ones are not forgotten when they fail, so there is a limit.
MAX_REMEMBERED = 10_000


class CycleLog:
    """`options`: those of the command line by which other commands find the same database."""

    def __init__(self, options: str = "") -> None:
        self._options = options
        self._log: Any = get_logger("windlass.up")
        self._config: Config | None = None
        self._last: dict[str, tuple[bool, str, str | None]] = {}
        # Workers whose activation was logged, oldest first.
        self._active: dict[str, None] = {}

    def _remember(self, worker_id: str, *, is_active: bool) -> None:
        if not is_active:
            self._active.pop(worker_id, None)
            return
        self._active[worker_id] = None
        while len(self._active) > MAX_REMEMBERED:
            del self._active[next(iter(self._active))]

    def announce(self, config: Config) -> None:
        """Log what to do next after the first cycle. A reload is not announced."""
        if not self._last:
            self._config = config

    def write(self, summary: Summary) -> None:
        kind = summary.decision.partition(":")[0]
        now = (summary.is_leader, kind, summary.hold)
        for worker_id, code, reason in summary.failures:
            self._log.warning("fail worker", fleet=summary.fleet, worker=worker_id, code=code, reason=reason)
        for worker_id, change, reason in summary.changes:
            if change == "active" and worker_id in self._active:
                continue
            self._remember(worker_id, is_active=change == "active")
            self._log.info("change worker", fleet=summary.fleet, worker=worker_id, change=change, reason=reason)
        for code, reason in summary.alerts:
            self._log.warning("fire alert", fleet=summary.fleet, code=code, reason=reason)
        did = {name: count for name, count in (summary.actions or {}).items() if count}
        if did or self._last.get(summary.fleet) != now:
            self._last[summary.fleet] = now
            if not summary.is_leader:
                decision = summary.decision or summary.standby_reason
                self._log.info("skip cycle", fleet=summary.fleet, decision=decision)
            else:
                self._log.info(
                    "finish cycle", fleet=summary.fleet, cycle=summary.cycle_id, decision=summary.decision, **did
                )
        if self._config is not None:
            config, self._config = self._config, None
            fleets, is_standby = _describe_fleets(config), not summary.is_leader
            self._log.info(
                "announce fleets",
                fleets=f"once this process leads, {fleets}" if is_standby else fleets,
                next=next_steps(config, self._options, is_standby=is_standby),
            )


def next_steps(config: Config, options: str, *, is_standby: bool = False) -> Mapping[str, str]:
    """What a person does after the start, by name."""
    queue = next((queue for fleet in config.fleets.values() for queue in fleet.queues), None)
    steps = {"standby": STANDBY_STEP} if is_standby else {}
    if queue is not None:
        steps["enqueue"] = f"""windlass enqueue {queue} '{{"prompt": "lighthouse"}}'{options}"""
    steps["watch"] = f"windlass status --watch{options}"
    if config.api.port is None:
        steps["dashboard"] = "add --port 8080 to this command"
    return {**steps, "stop": "Ctrl-C; workers finish their tasks first"}


def _describe_fleets(config: Config) -> str:
    described = [
        f"{name} serves {', '.join(fleet.queues)} with {fleet.min_workers} to {fleet.max_workers} workers"
        for name, fleet in list(config.fleets.items())[:MAX_FLEETS_NAMED]
    ]
    more = len(config.fleets) - len(described)
    return "; ".join(described) + (f"; and {more} more" if more else "")
