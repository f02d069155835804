"""What every demonstration promises about tasks, and whether it was kept. Every number is read from the database."""

from dataclasses import asdict, dataclass
from typing import Any

from windlass.cli.output import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    enqueued: int
    complete: int
    accepted_once: int
    accepted_twice: int
    attempts: int
    lost_attempts: int
    wait_p50_s: float | None
    wait_p95_s: float | None
    workers_spawned: int
    workers_left: int
    dead_letters: list[int]
    killed_worker_id: str | None
    killed_task_id: int | None
    noticed_after_s: float | None
    completed_by: str | None
    worker_ended_as: str | None
    took_s: float

    def problems(self) -> list[str]:
        """What was promised and not kept; empty if all is well."""
        return [problem for problem, is_kept in self.promises().items() if not is_kept]

    def promises(self) -> dict[str, bool]:
        """Each by what is wrong if it was not kept."""
        return {
            f"{self.accepted_twice} tasks were accepted more than once": self.accepted_twice == 0,
            f"{self.accepted_once} tasks were accepted exactly once": self.accepted_once == self.complete,
            f"{self.attempts} attempts do not add up": self.attempts == self.accepted_once + self.lost_attempts,
            "no worker was killed": self.killed_worker_id is not None,
            "the killed worker was not ended": self.worker_ended_as is not None,
            "the killed worker's task was not completed by another": self.completed_by
            not in (None, self.killed_worker_id),
        }

    def lines(self) -> list[tuple[str, str]]:
        lost = self.enqueued - self.complete - len(self.dead_letters)
        dead = f"{len(self.dead_letters)} dead letter, " if self.dead_letters else ""
        return [
            ("tasks", f"{self.enqueued} enqueued, {self.complete} complete, {dead}{lost or 'none'} lost"),
            ("results", f"{self.accepted_once} accepted once, {self.accepted_twice or 'none'} twice"),
            ("attempts", f"{self.attempts}, of which {self.lost_attempts} died with their worker"),
            ("wait in the queue", f"p50 {duration(self.wait_p50_s)}, p95 {duration(self.wait_p95_s)}"),
        ]

    def recovery(self) -> tuple[str, str]:
        return (
            f"its task {self.killed_task_id}",
            f"taken back after {duration(self.noticed_after_s)}, completed by {self.completed_by or 'nobody'}",
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
