"""The handler: a stand-in for a model that paints. It gets the column `input` and returns the column `output`."""


def paint(task):
    prompt = str(task.payload["prompt"])
    task.progress(0.5, "half way")
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    return {"url": f"https://files.example.com/{task.id}.png", "prompt": prompt}
