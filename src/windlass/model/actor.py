"""Who acts: the person or program that causes the changes of the current request or command.

An actor is `token:NAME#ID` for an API token, `session:NAME` for a browser session and `user:NAME@HOST` for the command
line. Stores write it into every event and into the owner of every new task. The control loop and workers have none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_ACTOR_CHARACTERS = 200
_actor: ContextVar[str | None] = ContextVar("windlass_actor", default=None)


def current_actor() -> str | None:
    return _actor.get()


@contextmanager
def acting_as(actor: str | None) -> Iterator[None]:
    token = _actor.set(actor[:MAX_ACTOR_CHARACTERS] if actor is not None else None)
    try:
        yield
    finally:
        _actor.reset(token)
