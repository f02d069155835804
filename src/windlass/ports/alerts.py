"""Alerts: their state and outbox in the store, and the notifiers that send messages.

The contract of the store:
- An alert is open at most once per fleet and key, however many orchestrators evaluate it. It fires, is seen again, and
  resolves.
- Firing and resolving each write one message per notifier in the same transaction. No message is lost by a restart. A
  delivered message is not sent again, unless its sender died before it recorded the delivery.
- A notifier gets the resolution of an alert only after, and only if, it got the firing.
- A notifier that is no longer configured gets no more messages.
"""

from collections.abc import Sequence
from typing import Protocol

from windlass.model.alert import Alert, AlertInputs, Message


class AlertStore(Protocol):
    async def alert_inputs(self) -> AlertInputs:
        """Everything that alert rules evaluate, except the results of provider calls."""

    async def record_alerts(
        self, firing: Sequence[Alert], notifiers: Sequence[str], resolve_after_s: float
    ) -> list[tuple[str, str | None, str, str]]:
        """Record the firing alerts, and resolve open ones not seen for `resolve_after_s`.

        Returns those that fired or resolved now: kind, fleet, code, reason.
        """

    async def take_messages(self, notifiers: Sequence[str], lease_s: float, limit: int) -> list[Message]:
        """Due messages, reserved for this caller for `lease_s`."""

    async def message_delivered(self, message_id: int) -> None: ...

    async def message_failed(self, message_id: int, error: str, retry_in_s: float | None) -> None:
        """Record a failed delivery. The message is due again after `retry_in_s`; None: it is never sent again."""

    async def sweep_alerts(self) -> int:
        """Apply retention to resolved alerts and their messages. Returns how many alerts were deleted."""


class Notifier(Protocol):
    """Sends messages to one destination. Raises NotDelivered or DeliveredInPart, within its own time limit."""

    @property
    def name(self) -> str:
        """Its name in the database and the log. Constant for a configuration."""

    async def send(self, message: Message) -> None: ...
