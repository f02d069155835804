"""The constraints of the SQL tables. Checks raise BadInput before anything is changed."""

import json
import struct

from windlass.model.errors import BadInput
from windlass.model.task import (
    FIRST_RUN_AFTER,
    MAX_TIMEOUT_S,
    MAX_UNIQUE_KEY_LENGTH,
    PROGRESS_DIGITS,
    RUN_AFTER_BEFORE,
    NewTask,
    check_queue_name,
)
from windlass.model.worker import MAX_CONCURRENCY, MAX_LEASE_S, MIN_LEASE_S, Registration

# PostgreSQL's integer.
MAX_INTEGER = 2**31 - 1


def check_new(doing: str, task: NewTask) -> None:
    check_queue_name(task.queue)
    if not -MAX_INTEGER - 1 <= task.priority <= MAX_INTEGER:
        raise BadInput(f"{doing}: priority {task.priority} is out of range.")
    if not 1 <= task.max_attempts <= MAX_INTEGER:
        raise BadInput(f"{doing}: max_attempts is {task.max_attempts}, but a task needs at least 1 attempt.")
    if task.timeout_s is not None and not 0 < task.timeout_s <= MAX_TIMEOUT_S:
        raise BadInput(f"{doing}: timeout_s is {task.timeout_s}, but it must be above 0 and at most ten years.")
    if task.run_after is not None and not FIRST_RUN_AFTER <= task.run_after < RUN_AFTER_BEFORE:
        raise BadInput(f"{doing}: run_after is {task.run_after}, but its year must be 2 to 9998.")
    if task.unique_key is not None and not 1 <= len(task.unique_key) <= MAX_UNIQUE_KEY_LENGTH:
        raise BadInput(f"{doing}: the unique key is empty or has more than {MAX_UNIQUE_KEY_LENGTH} characters.")
    check_json(doing, task.payload)


def check_json(doing: str, text: str | None) -> None:
    """Raise BadInput unless it is JSON. The limit on nesting is Python's; PostgreSQL allows some thousand levels."""
    if text is None:
        return
    try:
        # Integers as text: Python refuses to convert very long ones.
        json.loads(text, parse_constant=_refuse_constant, parse_int=str)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{doing}: {text[:80]!r} is not JSON ({error}).") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_registration(registration: Registration) -> None:
    for name in (registration.fleet, *registration.queues):
        check_queue_name(name)
    if not 1 <= registration.concurrency <= MAX_CONCURRENCY:
        raise BadInput(f"registering the worker: concurrency is {registration.concurrency}, but it must be 1 to 10000.")
    if not MIN_LEASE_S <= registration.lease_s <= MAX_LEASE_S:
        raise BadInput(f"registering the worker: lease_s is {registration.lease_s}, but it must be 1 to 86400.")


def check_limit(doing: str, limit: int) -> None:
    if limit < 0:
        raise BadInput(f"{doing}: the limit is {limit} and must not be below 0.")


def real(progress: float | None) -> float | None:
    """Rounded as PostgreSQL's type `real` and a store round."""
    if progress is None:
        return None
    try:
        rounded: float = struct.unpack("f", struct.pack("f", progress))[0]
    except (OverflowError, struct.error):
        raise BadInput(f"sending a heartbeat: {progress} cannot be a task's progress.") from None
    return round(rounded, PROGRESS_DIGITS)
