"""A worker that joins, says that it is ready, and never takes a task: what a pod does whose program hangs.

`python -m windlass.demo.stuck_worker JOIN_FILE`, on one pod of `windlass demo --on runpod`.
"""

import asyncio
import sys
from pathlib import Path

from windlass.model.errors import WindlassError
from windlass.model.worker import LIVE, Registration
from windlass.worker.gpu import GpuReader
from windlass.worker.http_transport import HttpTransport
from windlass.worker.join import join


async def idle(join_file: Path) -> None:
    """Until it is told to end, or nobody knows it any more."""
    credentials, tls, order = await join(join_file)
    gpu = GpuReader()
    gpu.start()
    async with HttpTransport(credentials, tls) as transport:
        registration = Registration(order.worker_id, order.queues, fleet=order.fleet, lease_s=order.lease_s)
        status = await transport.register(registration)
        while status in LIVE:
            pulse = await transport.heartbeat(order.worker_id, (), gpu.vitals())
            if pulse.status is None:
                return
            status = pulse.status
            await asyncio.sleep(order.heartbeat_interval_s)


if __name__ == "__main__":
    try:
        asyncio.run(idle(Path(sys.argv[1])))
    except WindlassError as error:
        sys.exit(str(error))
