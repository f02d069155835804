"""Loaded by every Python process of a benchmarked `windlass up`, because its folder is in PYTHONPATH.

It replaces two things as their modules are imported. The provider of every fleet lists the machines that the benchmark
wrote into the database, so that thousands of simulated workers look spawned and no machine is created. And each cycle
appends a line to a file: when it ended, how long it took, and whether this process leads. Processes that import neither
module, such as HTTP servers and workers, run unchanged.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _replace_provider(providers: ModuleType) -> None:
    from windlass.model.machine import Machine, MachineState, ProviderTraits  # noqa: PLC0415

    count = int(os.environ["BENCH_MACHINES"])
    machines = tuple(Machine(f"m{n}", f"w{n}", MachineState.RUNNING) for n in range(count))

    class StaticMachines:
        traits = ProviderTraits()

        async def list_machines(self) -> Any:
            return machines

        async def create(self, request: Any) -> Any:
            raise RuntimeError(f"unexpected create of {request.name}")

        async def delete(self, machine: Any) -> None:
            raise RuntimeError(f"unexpected delete of {machine.name}")

        async def close(self) -> None: ...

    setattr(providers, "make_provider", lambda *_: StaticMachines())  # noqa: B010


def _record_cycles(cycle: ModuleType) -> None:
    run = cycle.FleetCycle.run
    descriptor = os.open(os.environ["BENCH_CYCLES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    async def timed(self: Any, *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        summary = await run(self, *args, **options)
        ended = time.monotonic()
        os.write(descriptor, f"{ended} {ended - started} {int(summary.is_leader)} {os.getpid()}\n".encode())
        return summary

    cycle.FleetCycle.run = timed


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "windlass.wiring.providers": _replace_provider,
    "windlass.control.cycle": _record_cycles,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _CHANGES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if change is not None else None
        if spec is None or spec.loader is None or change is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        setattr(spec.loader, "exec_module", execute_and_change)  # noqa: B010
        return spec


if "BENCH_CYCLES" in os.environ:
    sys.meta_path.insert(0, _Finder())
