"""Image generation with a warm model. The model is a stand-in of 20 lines: replace `StandInModel` by your own.

The module is imported once per worker, so the model is loaded once and serves all tasks of the worker.
"""

import hashlib
import os
import struct
import zlib
from pathlib import Path

from windlass import RunningTask

SIZE = 64
WEIGHTS_BYTES = 1 << 20


class StandInModel:
    """Paints a pattern that depends on the prompt. It has weights to load, and no intelligence."""

    def __init__(self) -> None:
        self.weights = hashlib.shake_256(b"weights").digest(WEIGHTS_BYTES)

    def paint(self, prompt: str) -> bytes:
        """A grey picture of SIZE x SIZE pixels, as PNG."""
        start = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:2], "big")
        rows = [self.weights[start + row * SIZE : start + (row + 1) * SIZE] for row in range(SIZE)]
        header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 0, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
        parts = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in parts
        )


MODEL = StandInModel()
print(f"model loaded by process {os.getpid()}")


def generate(task: RunningTask) -> dict[str, object]:
    file = Path("images") / f"{task.id}.png"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(MODEL.paint(task.payload["prompt"]))
    return {"file": str(file), "loaded_by": os.getpid()}
