"""Counts with their noun, for decisions and messages."""


def plural(count: int, noun: str) -> str:
    """`1 worker`, `2,000 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"
