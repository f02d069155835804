"""Durations as PostgreSQL counts them."""

from datetime import timedelta


def interval(seconds: float) -> timedelta:
    """Rounded to microseconds as make_interval(secs => ...) does; timedelta(seconds=...) may differ by one."""
    return timedelta(microseconds=round(seconds * 1e6))


def whole_seconds(duration: timedelta) -> int:
    """Halves upwards, as PostgreSQL rounds, not to even as Python does."""
    return (duration + timedelta(milliseconds=500)) // timedelta(seconds=1)
