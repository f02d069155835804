"""A task, from putting it in to reading its result.

In one terminal, from this folder:    windlass worker --queue greetings --handler hello:greet
In another:                           python hello.py Ada
"""

import sys

from windlass import RunningTask, SyncClient


def greet(task: RunningTask) -> str:
    return f"Hello, {task.payload['name']}!"


if __name__ == "__main__":
    with SyncClient() as client:
        task_id = client.enqueue("greetings", {"name": sys.argv[1]})
        print(client.result(task_id, timeout_s=60))
