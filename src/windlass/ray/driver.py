"""The dispatcher's connection to Ray as a driver: submits seats, waits for them, kills them.

A driver needs a Ray node on its own host. A head is one; for a remote head, `ray start --address=... --num-cpus=0`
starts one. Everything a driver submitted ends with it. Ray kills the whole process of a driver that has lost its head
for long, so a dispatcher has its own process.
"""

import asyncio
import contextlib
import pickle
from collections.abc import Collection
from typing import Any

from windlass.model.errors import WindlassError
from windlass.model.node import Resources
from windlass.model.ray import frozen
from windlass.ray.cluster import FLEET_LABEL, first_line, to_label_value
from windlass.ray.seat_process import NodeUnusable, SeatExit, SeatJob, make_remote_function
from windlass.worker.executor import AttemptFailure

CONNECT_TIMEOUT_S = 30.0
# From the request to kill a seat to the end of its process. A seat that takes longer is out of reach with its node.
KILL_TIMEOUT_S = 5.0
MAX_REMOTE_FUNCTIONS = 1_000
MAX_ERROR_CHARS = 500
# Every node has this label of Ray's. Only spawned nodes have ours.
NODE_LABEL = "ray.io/node-id"


class Driver:
    """Submits seats to nodes with the label of `fleet`. None: to any node of the cluster."""

    def __init__(self, address: str, fleet: str | None, name: str) -> None:
        self._address = address
        self._fleet = fleet
        self._name = name
        # Ray's handle of the seat function, and its variants by needs and excluded nodes.
        self._function: Any = None
        self._functions: dict[object, Any] = {}
        self._job: SeatJob | None = None
        self.host = ""
        # Empty if Ray's dashboard does not run.
        self.dashboard_url = ""

    async def connect(self) -> None:
        """Raises WindlassError."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.to_thread(self._connect)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or f"no response within {CONNECT_TIMEOUT_S:g} s"
            raise WindlassError(
                f"cannot connect to the Ray cluster at {self._address}: {reason}. Check that its head runs and that "
                f"this host has a Ray node; `ray start --address={self._address} --num-cpus=0` starts one."
            ) from error

    def _connect(self) -> None:
        import ray

        context = ray.init(
            address=self._address,
            namespace="windlass",
            log_to_driver=False,
            logging_level="ERROR",
            job_config=ray.job_config.JobConfig(metadata={"job_name": self._name}),
        )
        self.host = ray.util.get_node_ip_address()
        self.dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else ""

    def set_job(self, job: SeatJob) -> None:
        """For all seats submitted from now on."""
        self._job = job

    def submit(self, seat_id: str, needs: Resources, excluded_nodes: Collection[str]) -> Any:
        key = (frozen(needs), frozenset(excluded_nodes))
        function = self._functions.get(key)
        if function is None:
            if len(self._functions) >= MAX_REMOTE_FUNCTIONS:
                self._functions.clear()
            function = self._functions[key] = self._make_function(dict(needs), excluded_nodes)
        # Bytes are what Ray serializes fastest. It would pass each of our objects through cloudpickle.
        return function.remote(pickle.dumps((seat_id, self._job)))

    def _make_function(self, needs: dict[str, float], excluded_nodes: Collection[str]) -> Any:
        import ray

        if self._function is None:
            self._function = ray.remote(make_remote_function())
        labels = {}
        if self._fleet is not None:
            labels[FLEET_LABEL] = to_label_value(self._fleet)
        if excluded_nodes:
            labels[NODE_LABEL] = f"!in({','.join(sorted(excluded_nodes))})"
        options: dict[str, Any] = {
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            # The queue decides about retries.
            "max_retries": 0,
            "name": f"windlass {self._fleet or 'task'}",
        }
        if "memory" in needs:
            options["memory"] = needs.pop("memory")
        if labels:
            options["label_selector"] = labels
        return self._function.options(resources=needs, **options)

    async def wait_for_exit(self, reference: Any) -> SeatExit | AttemptFailure:
        """Why the seat exited. If Ray ended it, that is a failure of the attempt that ran in it."""
        from ray import exceptions

        try:
            seat_exit: SeatExit | tuple[str, str] = await asyncio.wrap_future(reference.future())
        except exceptions.OutOfMemoryError as error:
            return AttemptFailure("OUT_OF_MEMORY", first_line(error, MAX_ERROR_CHARS))
        except (exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.OwnerDiedError) as error:
            return AttemptFailure("NODE_LOST", f"the node was lost ({first_line(error, MAX_ERROR_CHARS)})")
        except (exceptions.WorkerCrashedError, exceptions.LocalRayletDiedError) as error:
            return AttemptFailure("CHILD_DIED", f"the process or its node died ({first_line(error, MAX_ERROR_CHARS)})")
        except exceptions.RayTaskError as error:
            return AttemptFailure("WORKER_ERROR", str(error)[-4000:])
        except Exception as error:
            return AttemptFailure("RAY_ERROR", f"{type(error).__name__}: {first_line(error, MAX_ERROR_CHARS)}")
        if isinstance(seat_exit, tuple):
            node_id, reason = seat_exit
            return NodeUnusable(
                f"cannot import windlass on node {node_id} ({reason}). Install the same version there.", node_id
            )
        return seat_exit

    async def kill(self, reference: Any) -> None:
        """Kill a seat, pending or running, and wait until it is gone or out of reach. Does not say which."""
        import ray

        # Ray raises if the seat has ended already, which is what we want.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await asyncio.to_thread(ray.cancel, reference, force=True)
                await asyncio.wrap_future(reference.future())

    async def cancel(self, references: Collection[Any]) -> None:
        """Cancel seats and do not wait for their end."""
        import ray

        def cancel_all() -> None:
            for reference in references:
                with contextlib.suppress(Exception):  # as in kill
                    ray.cancel(reference, force=True)

        await asyncio.to_thread(cancel_all)
