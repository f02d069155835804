"""What control processes and server processes share through the database.

The contract:
- A record of a process is valid for PROCESS_TTL_S after its last renewal.
- Counters only grow. Increments of several processes add up.
- A requested cycle is answered once, by the first control process that answers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

from windlass.model.counters import CounterValue
from windlass.model.process import ProcessRecord

# Cycles that may be requested and not answered at the same time. One person or scheduler requests one.
MAX_CYCLE_REQUESTS = 100
# An older request is no longer waited for.
CYCLE_REQUEST_TTL_S = 60.0


class ProcessStore(Protocol):
    async def record_process(self, process: ProcessRecord) -> None:
        """Record, or renew, that this process runs."""

    async def processes(self) -> list[ProcessRecord]:
        """Processes recorded within PROCESS_TTL_S, newest first."""

    async def remove_process(self, process_id: UUID) -> None: ...

    async def release_leases(self, holder: str) -> None:
        """Release all leases of a process that is known to be dead. Their terms end."""

    async def add_counters(self, increments: Sequence[CounterValue]) -> None: ...

    async def counters(self) -> list[CounterValue]: ...

    async def request_cycle(self) -> int | None:
        """Request a cycle of every fleet. Returns the id of the request; None if MAX_CYCLE_REQUESTS are open."""

    async def cycle_answer(self, request_id: int) -> list[dict[str, Any]] | None:
        """The summaries of the requested cycles; None if they have not ended."""

    async def withdraw_cycle_request(self, request_id: int) -> None:
        """Remove a request, answered or not."""

    async def open_cycle_requests(self) -> list[int]:
        """Requests without an answer that are younger than CYCLE_REQUEST_TTL_S."""

    async def answer_cycle_requests(self, request_ids: Sequence[int], summaries: Sequence[Mapping[str, Any]]) -> None:
        """Requests that have an answer keep it."""

    async def watch_cycle_requests(
        self, set_listening: Callable[[bool], None], on_request: Callable[[str], None]
    ) -> None:
        """Call `on_request` until cancelled: with '' for a new request, or with the fleet of a person's operation.

        While not listening, requests must be polled for.
        """

    async def last_actions(self) -> Mapping[str, Mapping[str, int]]:
        """Action counts of the last cycle, by fleet."""
