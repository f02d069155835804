"""A worker that joins, sends heartbeats and never claims a task, like a pod whose program hangs.

`python -m windlass.demo.stuck_worker JOIN_FILE`, on one pod of `windlass demo --on runpod`.
"""

import asyncio
import sys
from pathlib import Path

from windlass.model.errors import WindlassError
from windlass.model.worker import LIVE, Registration
from windlass.worker.gpu import GpuReader
from windlass.worker.http_transport import HttpTransport
from windlass.worker.joining import join


async def idle(join_file: Path) -> None:
    """Return when the worker is no longer live."""
    credentials, tls, order = await join(join_file)
    gpu = GpuReader()
    gpu.start()
    async with HttpTransport(credentials, tls) as transport:
        registration = Registration(order.worker_id, order.queues, fleet=order.fleet, lease_s=order.lease_s)
        status = await transport.register(registration)
        while status in LIVE:
            reply = await transport.heartbeat(order.worker_id, (), gpu.vitals())
            if reply.status is None:
                return
            status = reply.status
            await asyncio.sleep(order.heartbeat_interval_s)


if __name__ == "__main__":
    try:
        asyncio.run(idle(Path(sys.argv[1])))
    except WindlassError as error:
        sys.exit(str(error))
