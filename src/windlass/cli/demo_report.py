"""What `windlass demo` promises, and whether it was kept. Every number is read from the database at the end."""

from dataclasses import asdict, dataclass
from typing import Any

from windlass.cli.output import duration

MIN_WORKERS = 1
# Of each task. The poisonous one takes a worker along in each of them.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Report:
    enqueued: int
    complete: int
    accepted_once: int
    accepted_twice: int
    attempts: int
    lost_attempts: int
    wait_p50_s: float | None
    wait_p95_s: float | None
    workers_hired: int
    workers_left: int
    dead_letters: list[int]
    poisonous_task_id: int
    poisoned_worker_ids: list[str]
    killed_worker_id: str | None
    killed_task_id: int | None
    noticed_after_s: float | None
    completed_by: str | None
    worker_ended_as: str | None
    took_s: float

    def problems(self) -> list[str]:
        """What was promised and not kept; empty if all is well."""
        dead = self.poisonous_task_id
        kept = {
            f"{self.complete} of {self.enqueued - 1} tasks are complete": self.complete == self.enqueued - 1,
            f"the dead letters are {self.dead_letters} instead of task {dead}": self.dead_letters == [dead],
            f"{self.accepted_twice} tasks were accepted more than once": self.accepted_twice == 0,
            f"{self.accepted_once} tasks were accepted exactly once": self.accepted_once == self.complete,
            f"{self.attempts} attempts do not add up": self.attempts == self.accepted_once + self.lost_attempts,
            f"task {dead} has a history of {self.poisoned_worker_ids}": len(set(self.poisoned_worker_ids)) == ATTEMPTS,
            "no worker was killed": self.killed_worker_id is not None,
            "the killed worker was not ended": self.worker_ended_as is not None,
            "the killed worker's task was not completed by another": self.completed_by
            not in (None, self.killed_worker_id),
            f"{self.workers_left} workers are left instead of {MIN_WORKERS}": self.workers_left == MIN_WORKERS,
        }
        return [problem for problem, is_kept in kept.items() if not is_kept]

    def lines(self) -> list[tuple[str, str]]:
        lost = self.enqueued - self.complete - len(self.dead_letters)
        return [
            (
                "tasks",
                f"{self.enqueued} enqueued, {self.complete} complete, {len(self.dead_letters)} dead letter, "
                f"{lost or 'none'} lost",
            ),
            ("results", f"{self.accepted_once} accepted once, {self.accepted_twice or 'none'} twice"),
            ("attempts", f"{self.attempts}, of which {self.lost_attempts} died with their worker"),
            ("wait in the queue", f"p50 {duration(self.wait_p50_s)}, p95 {duration(self.wait_p95_s)}"),
            ("workers", f"{self.workers_hired} hired in all, {self.workers_left} left, of a minimum of {MIN_WORKERS}"),
            ("killed by SIGKILL", f"{self.killed_worker_id}, ended as {self.worker_ended_as}"),
            (
                f"its task {self.killed_task_id}",
                f"taken back after {duration(self.noticed_after_s)}, completed by {self.completed_by or 'nobody'}",
            ),
            (
                f"dead letter {self.poisonous_task_id}",
                f"killed its worker in each of {len(self.poisoned_worker_ids)} attempts: "
                + ", ".join(self.poisoned_worker_ids),
            ),
            ("took", f"{self.took_s:.0f} s"),
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
