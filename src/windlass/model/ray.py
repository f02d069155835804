"""How a fleet whose tasks are placed by Ray is run: what tasks need, what nodes have.

Two kinds of amounts: those of a task, by which Ray finds a place for it, and those of a node, which Ray counts itself
unless it is told. `[fleets.NAME.ray]`, and `[fleets.NAME.ray.queues.QUEUE]` for a queue whose tasks need another.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from windlass.model.node import Resources

_MB = 1 << 20
# An exabyte: more than any node has, and in bytes still a number that can be counted with.
_MAX_MEMORY_MB = 1 << 40
# Ray counts in steps of this size.
SMALLEST_AMOUNT = 0.0001
_RESERVED = ("CPU", "GPU", "memory", "object_store_memory")
# Resources that Ray gives nodes by itself.
_FOUND_BY_RAY = ("accelerator_type:", "node:")
_SETTING_OF = {"CPU": "ray.node_cpus", "GPU": "ray.node_gpus"}


class _RaySection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskNeeds(_RaySection):
    num_cpus: float = Field(default=1.0, ge=0, allow_inf_nan=False, description="CPUs of a task.")
    num_gpus: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="GPUs of a task; a part of one is possible, beyond one whole ones.",
    )
    memory_mb: int | None = Field(
        default=None, gt=0, le=_MAX_MEMORY_MB, description="Memory of a task, reserved on its node."
    )
    resources: dict[str, float] = Field(default={}, description="Other amounts by name, as nodes were started with.")

    @field_validator("num_gpus")
    @classmethod
    def _is_a_part_or_whole(cls, num_gpus: float) -> float:
        # Ray refuses it when a task is submitted.
        if num_gpus > 1 and not num_gpus.is_integer():
            raise ValueError(f"beyond one, GPUs are whole ones, and it is {num_gpus:g}")
        return num_gpus

    @field_validator("resources")
    @classmethod
    def _are_amounts(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in _RESERVED:
                raise ValueError(f"write num_cpus, num_gpus or memory_mb for {name}")
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"it must be an amount, and {name} is {amount}")
        return resources

    def as_resources(self) -> Resources:
        """By Ray's names, without what is not needed."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        if self.memory_mb is not None:
            amounts["memory"] = float(self.memory_mb * _MB)
        return {name: amount for name, amount in amounts.items() if amount >= SMALLEST_AMOUNT}


class RaySettings(TaskNeeds):
    queues: dict[str, TaskNeeds] = Field(default={}, description="What tasks of single queues need instead.")
    margin: int = Field(
        default=8,
        ge=0,
        le=1000,
        description="Tasks claimed beyond what Ray has room for, so that no place waits for the database.",
    )
    node_cpus: int | None = Field(
        default=None,
        gt=0,
        description="CPUs each node offers. Without it: all it has; ray-local: for `concurrency` tasks of any queue.",
    )
    node_gpus: int | None = Field(
        default=None, ge=0, description="GPUs each node offers. Without it: all it has; ray-local: as CPUs."
    )
    node_resources: dict[str, float] = Field(
        default={}, description="Other amounts each node offers, by name; ray-local: beside those its tasks need."
    )
    object_store_mb: int | None = Field(
        default=None, ge=80, description="Shared memory of each node. Without it: Ray's choice; ray-local: 100."
    )

    def needs_of(self, queue: str) -> TaskNeeds:
        return self.queues.get(queue, self)

    def offered(self, queues: tuple[str, ...], concurrency: int) -> "RaySettings":
        """For nodes that share their host, and so must say what each has: unless these settings do, room for that many
        tasks of each queue. Ray counts CPUs and GPUs of nodes in whole ones."""
        room: dict[str, float] = {"CPU": concurrency}
        for needs in self.classes(queues):
            room |= {name: max(room.get(name, 0.0), concurrency * amount) for name, amount in needs}
        others = {name: amount for name, amount in room.items() if name not in _RESERVED}
        return self.model_copy(
            update={
                "node_cpus": self.node_cpus or math.ceil(room["CPU"]),
                "node_gpus": self.node_gpus if self.node_gpus is not None else math.ceil(room.get("GPU", 0.0)),
                "node_resources": others | self.node_resources,
            }
        )

    def problem_of_nodes(self, queues: tuple[str, ...]) -> str | None:
        """Why tasks of one of these queues would find no place on any node, as far as it is said what nodes have."""
        for queue in queues:
            needs = self.needs_of(queue).as_resources()
            for name, has in self.lacking(needs).items():
                where = _SETTING_OF.get(name, "ray.node_resources")
                return f"a task of queue {queue} needs {needs[name]:g} of {name} and a node has {has:g}: raise {where}"
        return None

    def lacking(self, needs: Resources) -> dict[str, float]:
        """What a node that is started with these settings has too little of, as far as they say, and how much."""
        said: dict[str, float | None] = {"CPU": self.node_cpus, "GPU": self.node_gpus}
        found = {}
        for name, amount in needs.items():
            if name != "memory" and not name.startswith(_FOUND_BY_RAY):
                has = said[name] if name in said else self.node_resources.get(name, 0.0)
                if has is not None and amount > has:
                    found[name] = has
        return found

    def classes(self, queues: tuple[str, ...]) -> dict[tuple[tuple[str, float], ...], tuple[str, ...]]:
        """The queues whose tasks need the same, together: a place for one is a place for all."""
        found: dict[tuple[tuple[str, float], ...], tuple[str, ...]] = {}
        for queue in queues:
            needs = frozen(self.needs_of(queue).as_resources())
            found[needs] = (*found.get(needs, ()), queue)
        return found


def frozen(resources: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((name, float(amount)) for name, amount in resources.items()))
