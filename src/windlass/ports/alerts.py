"""Telling people: what it needs of the store, and of whoever carries a message.

The contract of the store:
- The same thing is the matter once, however many look and however often: it begins, is seen again and again, and ends.
- Its beginning and its end are told to each receiver, by a message that is written down together with them. No restart
  forgets a message, and a message that was delivered is not sent again; one that was sent by somebody who died before
  saying so is.
- The end of an alert is told to those who were told its beginning, and after it.
- A receiver that is not configured any more is told nothing more.
"""

from collections.abc import Sequence
from typing import Protocol

from windlass.model.alert import Alert, AlertInputs, Message


class AlertStore(Protocol):
    async def alert_inputs(self) -> AlertInputs:
        """All that alerts are judged by, but what providers answered."""

    async def record_alerts(
        self, firing: Sequence[Alert], notifiers: Sequence[str], resolve_after_s: float
    ) -> list[tuple[str, str | None, str, str]]:
        """Write down what is the matter. Returns what began and what is over: kind, fleet, code, reason."""

    async def take_messages(self, notifiers: Sequence[str], lease_s: float, limit: int) -> list[Message]:
        """Messages that are due, ours for so long."""

    async def message_delivered(self, message_id: int) -> None: ...

    async def message_failed(self, message_id: int, error: str, retry_in_s: float | None) -> None:
        """It did not arrive, and is due again then. None: it is given up."""

    async def sweep_alerts(self) -> int:
        """Apply retention to what is over, and to what was told of it. Returns how many alerts went."""


class Notifier(Protocol):
    """Where messages go. Raises NotDelivered or DeliveredInPart, within its own time limit."""

    @property
    def name(self) -> str:
        """For the database and the log; never changes while the program is the same."""

    async def send(self, message: Message) -> None: ...
