"""`windlass demo`: workers are processes of this host.

A burst of tasks arrives and workers are spawned. One worker is killed, and one task kills every worker that runs it.
When the queue is empty, the fleet shrinks to its minimum.
"""

from typing import Any

from windlass.demo.environment import QUERIES, DemoEnvironment
from windlass.demo.report import DemoReport
from windlass.demo.scenario import DemoScenario

# Share of complete tasks at which a worker is killed, and position of the poisonous task.
KILL_AT = 1 / 4
POISON_AT = 1 / 2


class LocalDemo(DemoScenario):
    toml_tail = """\
poll_interval_s = 0.5
heartbeat_interval_s = 0.5
heartbeat_timeout_s = 10
idle_timeout_s = 3
stop_timeout_s = 10
"""
    machines = "worker processes"
    work_s = (0.2, 0.3, 0.4)
    min_workers = 1
    base_time_limit_s = 180.0

    async def advance(self, environment: DemoEnvironment, progress: Any) -> bool:
        if not progress["enqueued"]:
            if progress["ready"] >= self.min_workers:
                await self.enqueue(environment, self.task_count, is_poisonous=[round(POISON_AT * self.task_count)])
                self.print_line(f"{self.task_count} tasks enqueued; one of them kills every worker that runs it")
        elif self.killed is None and progress["complete"] >= KILL_AT * self.task_count:
            await self.kill_busy_worker(environment)
        elif not progress["unfinished"] and progress["workers"] == self.min_workers:
            self.print_line(f"the queue is empty, and the fleet is at min_workers ({self.min_workers})")
            return True
        return False

    async def read_details(self, environment: DemoEnvironment) -> dict[str, Any]:
        return dict(await environment.database.fetchrow(QUERIES["poison_task"]))

    def checks(self, report: DemoReport) -> dict[str, bool]:
        workers = report.details["poisoned_worker_ids"]
        problem = f"task {report.poisonous_task_id} was run by {workers}, expected {self.max_attempts} workers"
        return {problem: len(set(workers)) == self.max_attempts}

    def lines(self, report: DemoReport) -> list[tuple[str, str]]:
        workers = report.details["poisoned_worker_ids"]
        value = f"killed its worker in each of {len(workers)} attempts: {', '.join(workers)}"
        return [(f"failed task {report.poisonous_task_id}", value)]
