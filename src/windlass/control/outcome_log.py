"""Outcomes of provider calls that are not in the database yet.

The executor adds each outcome when its call ends; the cycle records them. If recording fails they stay, and the next
cycle records them before it observes, so no outcome is lost while the process runs.
"""

from collections.abc import Awaitable, Callable, Iterator

from windlass.model.outcome import Outcome


class OutcomeLog:
    """Unrecorded outcomes by the subject of their call: a worker, a machine or a volume."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}

    def __contains__(self, subject: str) -> bool:
        return subject in self._outcomes

    def __iter__(self) -> Iterator[str]:
        return iter(self._outcomes)

    def add(self, subject: str, outcome: Outcome) -> None:
        self._outcomes[subject] = outcome

    async def record(self, write: Callable[[list[Outcome]], Awaitable[None]]) -> list[Outcome]:
        """Pass all outcomes to `write`, and forget them once it has returned. Returns them."""
        taken = dict(self._outcomes)
        if taken:
            await write(list(taken.values()))
        for subject in taken:
            del self._outcomes[subject]
        return list(taken.values())
