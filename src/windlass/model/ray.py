"""Settings of fleets whose tasks Ray places: the resources that tasks need, and those that nodes have.

`[fleets.NAME.ray]` has the needs of tasks and the resources of nodes, which Ray detects if they are not set.
`[fleets.NAME.ray.queues.QUEUE]` has the needs of tasks of one queue.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from windlass.model.node import Resources

_MB = 1 << 20
# An exabyte: more than any node has, and still exact in bytes.
_MAX_MEMORY_MB = 1 << 40
# The resolution of resources in Ray.
SMALLEST_AMOUNT = 0.0001
_RESERVED = ("CPU", "GPU", "memory", "object_store_memory")
# Prefixes of resources that Ray detects on a node.
_DETECTED_BY_RAY = ("accelerator_type:", "node:")
_SETTING_OF = {"CPU": "ray.node_cpus", "GPU": "ray.node_gpus"}


class _RaySection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskNeeds(_RaySection):
    num_cpus: float = Field(default=1.0, ge=0, allow_inf_nan=False, description="CPUs of a task.")
    num_gpus: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="GPUs of a task. Fractions are allowed up to 1.",
    )
    memory_mb: int | None = Field(
        default=None, gt=0, le=_MAX_MEMORY_MB, description="Memory of a task, reserved on its node."
    )
    resources: dict[str, float] = Field(default={}, description="Custom resources of a task, by name.")

    @field_validator("num_gpus")
    @classmethod
    def _check_gpus(cls, num_gpus: float) -> float:
        # Otherwise Ray would refuse the task when it is submitted.
        if num_gpus > 1 and not num_gpus.is_integer():
            raise ValueError(f"above 1 it must be an integer, and it is {num_gpus:g}")
        return num_gpus

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in _RESERVED:
                raise ValueError(f"write num_cpus, num_gpus or memory_mb for {name}")
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"{name} must be a number of at least 0, and it is {amount}")
        return resources

    def as_resources(self) -> Resources:
        """By Ray's names, without amounts of zero."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        if self.memory_mb is not None:
            amounts["memory"] = float(self.memory_mb * _MB)
        return {name: amount for name, amount in amounts.items() if amount >= SMALLEST_AMOUNT}


class RaySettings(TaskNeeds):
    queues: dict[str, TaskNeeds] = Field(default={}, description="Needs of tasks of one queue, instead of these.")
    margin: int = Field(
        default=8,
        ge=0,
        le=1000,
        description="Tasks claimed in addition to free capacity, so that nodes do not wait for the database.",
    )
    node_cpus: int | None = Field(
        default=None,
        gt=0,
        description="CPUs of a node. Default: all CPUs; ray-local: enough for `concurrency` tasks of any queue.",
    )
    node_gpus: int | None = Field(
        default=None, ge=0, description="GPUs of a node. Default: all GPUs; ray-local: as for CPUs."
    )
    node_resources: dict[str, float] = Field(
        default={}, description="Custom resources of a node, by name; ray-local: in addition to those its tasks need."
    )
    object_store_mb: int | None = Field(
        default=None, ge=80, description="Shared memory of a node. Default: chosen by Ray; ray-local: 100."
    )

    def needs_of(self, queue: str) -> TaskNeeds:
        return self.queues.get(queue, self)

    def offered(self, queues: tuple[str, ...], concurrency: int) -> "RaySettings":
        """Settings with explicit resources, for nodes that share a host.

        Resources that are not set are enough for `concurrency` tasks of each queue. CPUs and GPUs of a node are
        integers in Ray.
        """
        needed: dict[str, float] = {"CPU": concurrency}
        for needs in self.classes(queues):
            needed |= {name: max(needed.get(name, 0.0), concurrency * amount) for name, amount in needs}
        others = {name: amount for name, amount in needed.items() if name not in _RESERVED}
        return self.model_copy(
            update={
                "node_cpus": self.node_cpus or math.ceil(needed["CPU"]),
                "node_gpus": self.node_gpus if self.node_gpus is not None else math.ceil(needed.get("GPU", 0.0)),
                "node_resources": others | self.node_resources,
            }
        )

    def problem_of_nodes(self, queues: tuple[str, ...]) -> str | None:
        """Why no node can run tasks of one of these queues, as far as the resources of nodes are set."""
        for queue in queues:
            needs = self.needs_of(queue).as_resources()
            for name, has in self.lacking(needs).items():
                where = _SETTING_OF.get(name, "ray.node_resources")
                return f"a task of queue {queue} needs {needs[name]:g} of {name} and a node has {has:g}: raise {where}"
        return None

    def lacking(self, needs: Resources) -> dict[str, float]:
        """The resources that a node with these settings has too little of, and the amount it has."""
        offered: dict[str, float | None] = {"CPU": self.node_cpus, "GPU": self.node_gpus}
        found = {}
        for name, amount in needs.items():
            if name != "memory" and not name.startswith(_DETECTED_BY_RAY):
                has = offered[name] if name in offered else self.node_resources.get(name, 0.0)
                if has is not None and amount > has:
                    found[name] = has
        return found

    def classes(self, queues: tuple[str, ...]) -> dict[tuple[tuple[str, float], ...], tuple[str, ...]]:
        """Queues grouped by the needs of their tasks."""
        found: dict[tuple[tuple[str, float], ...], tuple[str, ...]] = {}
        for queue in queues:
            needs = frozen(self.needs_of(queue).as_resources())
            found[needs] = (*found.get(needs, ()), queue)
        return found


def frozen(resources: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((name, float(amount)) for name, amount in resources.items()))
