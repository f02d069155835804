"""What `windlass demo` promises on this host, and whether it was kept."""

from dataclasses import dataclass

from windlass.demo.report import DemoReport

MIN_WORKERS = 1
# Of each task. The poisonous one takes a worker along in each of them.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReport(DemoReport):
    poisonous_task_id: int
    poisoned_worker_ids: list[str]

    def promises(self) -> dict[str, bool]:
        dead = self.poisonous_task_id
        return {
            f"{self.complete} of {self.enqueued - 1} tasks are complete": self.complete == self.enqueued - 1,
            f"the dead letters are {self.dead_letters} instead of task {dead}": self.dead_letters == [dead],
            **DemoReport.promises(self),
            f"task {dead} has a history of {self.poisoned_worker_ids}": len(set(self.poisoned_worker_ids)) == ATTEMPTS,
            f"{self.workers_left} workers are left instead of {MIN_WORKERS}": self.workers_left == MIN_WORKERS,
        }

    def lines(self) -> list[tuple[str, str]]:
        return [
            *DemoReport.lines(self),
            (
                "workers",
                f"{self.workers_spawned} hired in all, {self.workers_left} left, of a minimum of {MIN_WORKERS}",
            ),
            ("killed by SIGKILL", f"{self.killed_worker_id}, ended as {self.worker_ended_as}"),
            self.recovery(),
            (
                f"dead letter {self.poisonous_task_id}",
                f"killed its worker in each of {len(self.poisoned_worker_ids)} attempts: "
                + ", ".join(self.poisoned_worker_ids),
            ),
            ("took", f"{self.took_s:.0f} s"),
        ]
