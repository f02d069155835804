"""A message as programs and people read it, the same in every receiver."""

from typing import Any

from windlass.model.alert import ADVICE, Message, MessageKind


def to_plain(message: Message) -> dict[str, Any]:
    """For programs. `id` is the same when a message comes twice, `alert_id` for an alert's beginning and end."""
    return {
        "id": message.id,
        "alert_id": message.alert_id,
        "status": str(message.kind),
        "fleet": message.fleet,
        "code": message.code,
        "severity": str(message.severity),
        "reason": message.reason,
        "advice": ADVICE.get(message.code),
        "since": message.since.isoformat(),
        "resolved_at": message.resolved_at.isoformat() if message.resolved_at is not None else None,
    }


def to_sentences(message: Message) -> str:
    """For people, below the title."""
    if message.kind is MessageKind.RESOLVED:
        lasted_s = (message.resolved_at - message.since).total_seconds() if message.resolved_at is not None else 0.0
        return f"It is over after {lasted_s / 60:.0f} minutes: {message.reason}."
    advice = ADVICE.get(message.code)
    return f"{message.reason}." + (f"\nWhat to do: {advice}." if advice is not None else "")
