"""Secrets that this process knows for the time of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

from windlass.model import redaction


@contextmanager
def known_secrets(*secrets: str) -> Iterator[None]:
    before = redaction._known
    redaction.set_known_secrets(secrets)
    try:
        yield
    finally:
        redaction._known = before
