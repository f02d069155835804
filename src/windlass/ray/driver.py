"""The dispatcher as Ray's driver: hands seats over, waits for them, ends them.

A driver needs a Ray node on its own host: an embedded head is one; for a head elsewhere, `ray start --address=...
--num-cpus=0` makes one. What a driver submitted ends with it. A driver that has lost its head for long is ended by Ray,
process and all: so it is a process of its own.
"""

import asyncio
import contextlib
import pickle
from collections.abc import Collection
from typing import Any

from windlass.model.errors import WindlassError
from windlass.model.node import Resources
from windlass.model.ray import frozen
from windlass.ray.cluster import FLEET_LABEL, label_value
from windlass.ray.seat_process import Job, NoHandler, Parting, portable
from windlass.worker.executor import AttemptFailure

CONNECT_TIMEOUT_S = 30.0
# From the order to end a seat to the end of its process. It then is not there, or out of our reach with its node.
END_TIMEOUT_S = 5.0
MAX_HANDLES = 1_000
# Ray gives it to every node; our own labels only those have that we hired.
NODE_LABEL = "ray.io/node-id"


class Driver:
    """`fleet`: seats are on nodes that carry its label. None: on any node of the cluster."""

    def __init__(self, address: str, fleet: str | None, name: str) -> None:
        self._address = address
        self._fleet = fleet
        self._name = name
        self._function: Any = None
        self._handles: dict[object, Any] = {}
        self._job: Job | None = None
        self.host = ""
        # Empty where Ray's dashboard does not run.
        self.dashboard_url = ""

    async def connect(self) -> None:
        """Raises WindlassError."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.to_thread(self._connect)
        except Exception as error:
            said = str(error).strip().partition("\n")[0] or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            raise WindlassError(
                f"cannot use the Ray cluster at {self._address} ({said}): is its head there, and a Ray node on this "
                f"host? `ray start --address={self._address} --num-cpus=0` makes one."
            ) from error

    def _connect(self) -> None:
        import ray  # noqa: PLC0415

        context = ray.init(
            address=self._address,
            namespace="windlass",
            log_to_driver=False,
            logging_level="ERROR",
            job_config=ray.job_config.JobConfig(metadata={"job_name": self._name}),
        )
        self.host = ray.util.get_node_ip_address()
        self.dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else ""

    def use(self, job: Job) -> None:
        """For all seats from here on."""
        self._job = job

    def submit(self, seat_id: str, needs: Resources, closed: Collection[str]) -> Any:
        # Bytes are what Ray handles fastest: objects of ours it would take apart with cloudpickle, each by itself.
        return self._handle(needs, closed).remote(pickle.dumps((seat_id, self._job)))

    async def parting(self, reference: Any) -> Parting | AttemptFailure:
        """How it ended. Whatever Ray says of one that it could not bring to an end is a failure of what ran there."""
        from ray import exceptions  # noqa: PLC0415

        try:
            parting: Parting | tuple[str, str] = await asyncio.wrap_future(reference.future())
        except exceptions.OutOfMemoryError as error:
            return AttemptFailure("OUT_OF_MEMORY", _first_line(error))
        except (exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.OwnerDiedError) as error:
            return AttemptFailure("NODE_LOST", f"its node was lost ({_first_line(error)})")
        except (exceptions.WorkerCrashedError, exceptions.LocalRayletDiedError) as error:
            return AttemptFailure("CHILD_DIED", f"its process, or its node, died ({_first_line(error)})")
        except exceptions.RayTaskError as error:
            return AttemptFailure("WORKER_ERROR", str(error)[-4000:])
        except Exception as error:
            return AttemptFailure("ENGINE_ERROR", f"{type(error).__name__}: {_first_line(error)}")
        if isinstance(parting, tuple):
            node_id, why = parting
            return NoHandler(
                f"windlass cannot be used on node {node_id} ({why}): install the same version there.", node_id
            )
        return parting

    async def end(self, reference: Any) -> None:
        """End a seat, waiting or running, and wait until it is gone or out of reach. Which of the two is not said."""
        import ray  # noqa: PLC0415

        # Whatever Ray says against it (it has ended, it is nobody's): what counts is that it is over.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.to_thread(ray.cancel, reference, force=True)
                await asyncio.wrap_future(reference.future())

    async def call_back(self, references: Collection[Any]) -> None:
        """End seats that nobody needs any more, and do not wait for it."""
        import ray  # noqa: PLC0415

        def cancel() -> None:
            for reference in references:
                # As above: it may be over.
                with contextlib.suppress(Exception):
                    ray.cancel(reference, force=True)

        await asyncio.to_thread(cancel)

    def _handle(self, needs: Resources, closed: Collection[str]) -> Any:
        key = (frozen(needs), frozenset(closed))
        handle = self._handles.get(key)
        if handle is None:
            if len(self._handles) >= MAX_HANDLES:
                self._handles.clear()
            handle = self._handles[key] = self._make_handle(dict(needs), closed)
        return handle

    def _make_handle(self, needs: dict[str, float], closed: Collection[str]) -> Any:
        import ray  # noqa: PLC0415

        if self._function is None:
            self._function = ray.remote(portable())
        labels = {}
        if self._fleet is not None:
            labels[FLEET_LABEL] = label_value(self._fleet)
        if closed:
            labels[NODE_LABEL] = f"!in({','.join(sorted(closed))})"
        options: dict[str, Any] = {
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            # Whether and when an attempt is repeated, the queue says.
            "max_retries": 0,
            "name": f"windlass {self._fleet or 'task'}",
        }
        if "memory" in needs:
            options["memory"] = needs.pop("memory")
        if labels:
            options["label_selector"] = labels
        return self._function.options(resources=needs, **options)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0][:500]
