"""Reads a Ray cluster from outside: versions, nodes, their resources and usage; and drains nodes.

It connects to the head's control service (GCS) without becoming a driver, so reading costs the cluster nothing. A call
without an answer within the time limit raises ClusterUnavailable.
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
# Labels of nodes that Windlass spawned.
WORKER_LABEL = "windlass-worker"
FLEET_LABEL = "windlass-fleet"
# Prefixes of resources that Ray adds to a node for its own use.
_INTERNAL = ("node:", "object_store_memory", "accelerator_type:")
_Result = TypeVar("_Result")


def to_label_value(name: str) -> str:
    """A fleet's name in the form that Ray accepts for labels. Most names stay as they are."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", name):
        return name
    plain = re.sub(r"[^A-Za-z0-9-]", "-", name)[:40].strip("-")
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def first_line(error: BaseException, max_chars: int) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0][:max_chars]


class ClusterUnavailable(WindlassError):
    """The head did not respond."""


class ClusterReplaced(WindlassError):
    """Another cluster responds at the same address: the head restarted without its state and knows no driver."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    node_id: str
    is_alive: bool
    labels: dict[str, str]
    address: str
    total: Resources
    used: Resources
    death_reason: str = ""


class Cluster:
    def __init__(self, address: str) -> None:
        self.address = address
        self._client: Any = None
        # The id of the cluster that responded first.
        self._cluster_id: str | None = None

    async def fetch_versions(self) -> Versions:
        def fetch() -> Versions:
            from ray._private.ray_constants import KV_NAMESPACE_CLUSTER

            metadata = self.connect().internal_kv_get(
                b"CLUSTER_METADATA", namespace=KV_NAMESPACE_CLUSTER, timeout=CALL_TIMEOUT_S
            )
            if metadata is None:
                raise ClusterUnavailable(f"cannot read the versions of the Ray head {self.address}: not set yet")
            versions = json.loads(metadata)
            return Versions(versions["ray_version"], versions["python_version"])

        return await self._call("read the versions of the Ray head", fetch)

    async def list_nodes(self) -> list[ClusterNode]:
        """Live nodes, and the dead ones that the head remembers."""

        def fetch() -> list[ClusterNode]:
            from ray.core.generated import autoscaler_pb2, gcs_pb2

            gcs = self.connect()
            state = gcs.get_cluster_resource_state(CALL_TIMEOUT_S)
            if isinstance(state, bytes):
                state = autoscaler_pb2.GetClusterResourceStateReply.FromString(state)
            free = {n.node_id: dict(n.available_resources) for n in state.cluster_resource_state.node_states}
            infos = gcs.get_all_node_info(timeout=CALL_TIMEOUT_S).values()
            alive = gcs_pb2.GcsNodeInfo.GcsNodeState.Value("ALIVE")
            return [_make_node(info, free.get(info.node_id, {}), is_alive=info.state == alive) for info in infos]

        return await self._call("list the nodes of the Ray head", fetch)

    async def drain_node(self, node_id: str, reason: str, timeout_s: float) -> None:
        """Place no more tasks on the node, which exits once it is empty.

        After the timeout Ray does nothing more; the node then ends with its machine.
        """

        def drain() -> None:
            from ray.core.generated.autoscaler_pb2 import DrainNodeReason

            deadline_ms = int((time.time() + timeout_s) * 1000)
            preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            self.connect().drain_node(node_id, preemption, reason, deadline_ms, timeout=CALL_TIMEOUT_S)

        await self._call(f"drain node {node_id} of the Ray head", drain)

    async def _call(self, action: str, function: Callable[[], _Result]) -> _Result:
        try:
            async with asyncio.timeout(2 * CALL_TIMEOUT_S):
                return await asyncio.to_thread(function)
        except TimeoutError:
            raise ClusterUnavailable(f"cannot {action} {self.address}: no response") from None
        except WindlassError:
            raise
        except Exception as error:
            # A client that failed once may be connected to a head that no longer exists.
            self._client = None
            raise ClusterUnavailable(f"cannot {action} {self.address}: {first_line(error, 200)}") from error

    def connect(self) -> Any:
        """Ray's client for the head, connected once. Blocks. Raises ClusterReplaced."""
        if self._client is None:
            raylet: Any = importlib.import_module("ray._raylet")
            client = raylet.GcsClient(address=self.address)
            cluster_id = client.cluster_id.hex()
            self._cluster_id = self._cluster_id or cluster_id
            if cluster_id != self._cluster_id:
                raise ClusterReplaced(f"the Ray head at {self.address} was replaced by a new cluster")
            self._client = client
        return self._client


def _make_node(info: Any, free: dict[str, float], *, is_alive: bool) -> ClusterNode:
    total = {name: amount for name, amount in info.resources_total.items() if not name.startswith(_INTERNAL)}
    return ClusterNode(
        node_id=info.node_id.hex(),
        is_alive=is_alive,
        labels=dict(info.labels),
        address=info.node_manager_address,
        total=total,
        used={name: round(amount - free.get(name, 0.0), 4) for name, amount in total.items()},
        death_reason=info.death_info.reason_message or "" if not is_alive else "",
    )
