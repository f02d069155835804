"""A batch limit that adapts to the line: halved after an unanswered call, raised by an eighth after a full batch."""

from dataclasses import dataclass


@dataclass(slots=True)
class AdaptiveBatch:
    max_size: int
    min_size: int = 1
    size: int = 0

    def __post_init__(self) -> None:
        self.size = self.max_size

    def shrink(self) -> None:
        self.size = max(self.size // 2, self.min_size)

    def grow(self) -> None:
        # Slowly: a batch that is still too large costs half a lease of waiting.
        self.size = min(self.size + max(self.size // 8, 1), self.max_size)
