"""`windlass demo --on ray`: workers are nodes of a Ray cluster on this host.

`windlass up` starts a Ray head and a dispatcher. A burst of tasks arrives, raylets are spawned and join, and Ray places
the tasks on them. One node is killed. When the queue is empty, all nodes are terminated.
"""

from contextlib import suppress
from typing import Any

import psutil

from windlass.demo.environment import QUERIES, DemoEnvironment
from windlass.demo.report import DemoReport
from windlass.demo.scenario import DemoScenario

# Share of complete tasks at which a node is killed.
KILL_AT = 1 / 4


class RayDemo(DemoScenario):
    toml_tail = """\
provider = "ray-local"
concurrency = 2
poll_interval_s = 0.5
heartbeat_interval_s = 1
heartbeat_timeout_s = 15
spawn_timeout_s = 60
idle_timeout_s = 3
stop_timeout_s = 15
"""
    machines = "Ray nodes, with a head and a dispatcher, as processes of this host"
    work_s = (0.3, 0.4, 0.5)
    # The dispatcher writes the results, and it is not suspended with the node.
    delivery_s = 1.0
    # A Ray head and its nodes start slowly.
    base_time_limit_s = 300.0

    async def advance(self, environment: DemoEnvironment, progress: Any) -> bool:
        if not progress["enqueued"]:
            if progress["dispatchers"]:
                self.print_line("the Ray head and the dispatcher are running")
                await self.enqueue(environment, self.task_count)
                self.print_line(f"{self.task_count} tasks enqueued")
        elif self.killed is None and progress["complete"] >= KILL_AT * self.task_count:
            await self.kill_busy_worker(environment)
        elif not progress["unfinished"] and not progress["workers"]:
            self.print_line("the queue is empty, and all nodes are terminated")
            return True
        return False

    def processes_to_kill(self, pid: int) -> list[psutil.Process]:
        """The raylet and all processes that it started."""
        with suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                if child.name() == "raylet":
                    return [child, *child.children(recursive=True)]
        return []

    async def read_details(self, environment: DemoEnvironment) -> dict[str, Any]:
        return {"nodes_at_work": await environment.database.fetchval(QUERIES["count_used_nodes"])}

    def checks(self, report: DemoReport) -> dict[str, bool]:
        nodes = report.details["nodes_at_work"]
        return {f"tasks ran on {nodes} nodes, expected more than 1": nodes > 1}

    def lines(self, report: DemoReport) -> list[tuple[str, str]]:
        return [("nodes with tasks", str(report.details["nodes_at_work"]))]
