"""The same as hello.py, for programs with an event loop.

In one terminal, from this folder:    windlass worker --queue greetings --handler hello_async:greet
In another:                           python hello_async.py Ada
"""

import asyncio
import sys

from windlass import Client, RunningTask


async def greet(task: RunningTask) -> str:
    return f"Hello, {task.payload['name']}!"


async def main() -> None:
    async with Client() as client:
        task_id = await client.enqueue("greetings", {"name": sys.argv[1]})
        print(await client.result(task_id, timeout_s=60))


if __name__ == "__main__":
    asyncio.run(main())
