"""Ask a Ray head whether it is there and which versions it runs, from a process of its own.

Ray's client ends the process that holds it, without a word to Python, when its head has been away for a while. The
orchestrator must outlive any head, so it holds no such client and asks by this.
"""

import asyncio
import json
import math
import os
import sys

from windlass.ray.cluster import Cluster, ClusterUnavailable
from windlass.ray.versions import Versions
from windlass.worker.process import start_group

POLL_S = 0.1
# For the answer's last step, and for Python and Ray to load.
START_S = 15.0
MAX_ANSWER_BYTES = 10_000


async def greet(address: str, limit_s: float) -> Versions:
    """The versions of the head at this address, once it has a node. Raises ClusterUnavailable when the time is over."""
    group = await start_group(
        [sys.executable, "-P", "-m", "windlass.ray.probe", address, str(limit_s)],
        env=os.environ,
        max_answer_bytes=MAX_ANSWER_BYTES,
        max_output_bytes=math.inf,
        forwards_output=False,
    )
    try:
        async with asyncio.timeout(limit_s + START_S):
            code = await group.wait()
    except TimeoutError:
        code = None
    finally:
        await group.end()
    if code != 0:
        raise ClusterUnavailable(f"asking for the versions of the Ray head: {address} did not answer")
    return Versions(**json.loads(group.answer))


async def _answer(address: str, limit_s: float) -> Versions:
    cluster = Cluster(address)
    async with asyncio.timeout(limit_s):
        while True:
            try:
                if any(node.is_alive for node in await cluster.nodes()):
                    return await cluster.versions()
            except ClusterUnavailable:
                pass
            await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    found = asyncio.run(_answer(sys.argv[1], float(sys.argv[2])))
    print(json.dumps({"ray": found.ray, "python": found.python}))  # noqa: T201 - the answer
