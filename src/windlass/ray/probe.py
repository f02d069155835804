"""Asks a Ray head for its versions, from a child process.

Ray's client kills the process that holds it, without an exception in Python, when its head has been away for a while.
The orchestrator must outlive any head, so it holds no such client and uses this probe.
"""

import asyncio
import json
import os
import sys

from windlass.ray.cluster import Cluster, ClusterUnavailable
from windlass.ray.versions import Versions
from windlass.worker.process import start_group

POLL_INTERVAL_S = 0.1
# In addition to the time limit: for Python and Ray to load.
START_TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 10_000


async def probe_head(address: str, timeout_s: float) -> Versions:
    """The versions of the head at this address, once it has a live node. Raises ClusterUnavailable on timeout."""
    group = await start_group(
        [sys.executable, "-P", "-m", "windlass.ray.probe", address, str(timeout_s)],
        env=os.environ,
        max_answer_bytes=MAX_ANSWER_BYTES,
        limits_output=False,
        forwards_output=False,
    )
    try:
        async with asyncio.timeout(timeout_s + START_TIMEOUT_S):
            code = await group.wait()
    except TimeoutError:
        code = None
    finally:
        await group.end()
    if code != 0:
        raise ClusterUnavailable(f"the Ray head at {address} did not respond within {timeout_s:g} s")
    return Versions(**json.loads(group.answer))


async def _wait_for_versions(address: str, timeout_s: float) -> Versions:
    cluster = Cluster(address)
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                if any(node.is_alive for node in await cluster.list_nodes()):
                    return await cluster.fetch_versions()
            except ClusterUnavailable:
                pass
            await asyncio.sleep(POLL_INTERVAL_S)


if __name__ == "__main__":
    found = asyncio.run(_wait_for_versions(sys.argv[1], float(sys.argv[2])))
    print(json.dumps({"ray": found.ray, "python": found.python}))  # noqa: T201 - read by probe_head
