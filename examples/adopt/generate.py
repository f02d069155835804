"""The handler of the example: windlass worker --queue generations --handler generate:generate"""

from windlass import RunningTask


def generate(task: RunningTask) -> dict[str, str]:
    print(f"attempt {task.attempt} of {task.payload['prompt']}")
    return {"url": f"https://files.example.com/{task.payload['id']}.png"}
