"""The contents of a message, the same for every notifier."""

from typing import Any

from windlass.model.alert import Message, MessageKind, advice_on


def to_plain(message: Message) -> dict[str, Any]:
    """For programs. A repeated delivery has the same `id`; both messages of an alert have the same `alert_id`."""
    return {
        "id": message.id,
        "alert_id": message.alert_id,
        "status": str(message.kind),
        "fleet": message.fleet,
        "code": message.code,
        "severity": str(message.severity),
        "reason": message.reason,
        "advice": advice_on(message.code, message.fleet),
        "since": message.since.isoformat(),
        "resolved_at": message.resolved_at.isoformat() if message.resolved_at is not None else None,
    }


def to_sentences(message: Message) -> str:
    """For people; the title comes first."""
    if message.kind is MessageKind.RESOLVED:
        lasted_s = (message.resolved_at - message.since).total_seconds() if message.resolved_at is not None else 0.0
        return f"Resolved after {lasted_s / 60:.0f} minutes: {message.reason}."
    advice = advice_on(message.code, message.fleet)
    return f"{message.reason}." + (f"\nWhat to do: {advice}." if advice is not None else "")
