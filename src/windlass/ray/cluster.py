"""A Ray cluster seen from outside: its versions, its nodes and what they have and use, and how to drain one.

Needs no connection as a driver, so whoever only looks costs the cluster nothing. Everything is asked of the head (GCS);
no answer within the limit raises ClusterUnavailable.
"""

import asyncio
import hashlib
import importlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from windlass.model.errors import WindlassError
from windlass.model.node import Resources
from windlass.ray.versions import Versions

CALL_TIMEOUT_S = 5.0
# Labels of our nodes.
WORKER_LABEL = "windlass-worker"
FLEET_LABEL = "windlass-fleet"
# What Ray adds to a node's resources for its own use.
_INTERNAL = ("node:", "object_store_memory", "accelerator_type:")
Answer = TypeVar("Answer")


def label_value(name: str) -> str:
    """A fleet's name as Ray takes it for a label: most are taken as they are."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", name):
        return name
    plain = re.sub(r"[^A-Za-z0-9-]", "-", name)[:40].strip("-")
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


class ClusterUnavailable(WindlassError):
    """The head did not answer."""


class ClusterReplaced(WindlassError):
    """Another cluster is at the same address: a head that came back without its memory. It knows no earlier driver."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    node_id: str
    is_alive: bool
    labels: dict[str, str]
    address: str
    total: Resources
    used: Resources
    is_head: bool
    death: str = ""


class Cluster:
    def __init__(self, address: str) -> None:
        self.address = address
        self._client: Any = None
        # Of the cluster that answered first.
        self._cluster_id: str | None = None

    async def versions(self) -> Versions:
        return await self._ask("asking for the versions of the Ray head", self._versions)

    async def nodes(self) -> list[ClusterNode]:
        """Those alive, and those that are known to be dead."""
        return await self._ask("asking for Ray's nodes", self._nodes)

    async def drain(self, node_id: str, reason: str, limit_s: float) -> None:
        """Let no more tasks onto a node, which ends by itself when it is empty. If it is not when the time is over, Ray
        leaves it to whoever ends the machine."""
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # noqa: PLC0415

        def drain() -> None:
            deadline_ms = int((time.time() + limit_s) * 1000)
            preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            self._gcs().drain_node(node_id, preemption, reason, deadline_ms, timeout=CALL_TIMEOUT_S)

        await self._ask(f"draining node {node_id}", drain)

    async def _ask(self, doing: str, function: Callable[[], Answer]) -> Answer:
        try:
            async with asyncio.timeout(2 * CALL_TIMEOUT_S):
                return await asyncio.to_thread(function)
        except TimeoutError:
            raise ClusterUnavailable(f"{doing}: {self.address} did not answer") from None
        except WindlassError:
            raise
        except Exception as error:
            # A client that failed once may know a head that is not there any more.
            self._client = None
            raise ClusterUnavailable(f"{doing}: {self.address} did not answer ({_first_line(error)})") from error

    def _gcs(self) -> Any:
        if self._client is None:
            raylet: Any = importlib.import_module("ray._raylet")
            client = raylet.GcsClient(address=self.address)
            cluster_id = client.cluster_id.hex()
            self._cluster_id = self._cluster_id or cluster_id
            if cluster_id != self._cluster_id:
                raise ClusterReplaced(f"the Ray head at {self.address} is another one than before")
            self._client = client
        return self._client

    def _versions(self) -> Versions:
        from ray._private.ray_constants import KV_NAMESPACE_CLUSTER  # noqa: PLC0415

        said = self._gcs().internal_kv_get(b"CLUSTER_METADATA", namespace=KV_NAMESPACE_CLUSTER, timeout=CALL_TIMEOUT_S)
        if said is None:
            raise ClusterUnavailable(f"asking for the versions of the Ray head: {self.address} does not know them yet")
        known = json.loads(said)
        return Versions(known["ray_version"], known["python_version"])

    def _nodes(self) -> list[ClusterNode]:
        from ray.core.generated import autoscaler_pb2, gcs_pb2  # noqa: PLC0415

        state = self._gcs().get_cluster_resource_state(CALL_TIMEOUT_S)
        if isinstance(state, bytes):
            state = autoscaler_pb2.GetClusterResourceStateReply.FromString(state)
        free = {n.node_id: dict(n.available_resources) for n in state.cluster_resource_state.node_states}
        known = self._gcs().get_all_node_info(timeout=CALL_TIMEOUT_S).values()
        alive = gcs_pb2.GcsNodeInfo.GcsNodeState.Value("ALIVE")
        return [_node(info, free.get(info.node_id, {}), is_alive=info.state == alive) for info in known]


def _node(info: Any, free: dict[str, float], *, is_alive: bool) -> ClusterNode:
    total = {name: amount for name, amount in info.resources_total.items() if not name.startswith(_INTERNAL)}
    return ClusterNode(
        node_id=info.node_id.hex(),
        is_alive=is_alive,
        labels=dict(info.labels),
        address=info.node_manager_address,
        total=total,
        used={name: round(amount - free.get(name, 0.0), 4) for name, amount in total.items()},
        is_head=info.is_head_node,
        death=info.death_info.reason_message or "" if not is_alive else "",
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0][:200]
