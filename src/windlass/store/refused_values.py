"""Explains why the database refused a value, in our words: callers must not see its constraints and types.

Messages that our own SQL functions raise are sentences for callers, and are kept. A refusal that no input of a caller
can cause is a defect, and is raised unchanged: the server answers 500 and logs it.
"""

import re

import asyncpg

from windlass.model.errors import BadInput
from windlass.store.connection import words

_NAME_RULE = "a name must have at most 63 letters, digits and _ . : -, and begin with a letter or digit"
# By constraint. Others get a general sentence.
_RULES = {
    "name_check": _NAME_RULE,
    "task_key_check": "a unique key must have 1 to 200 characters",
    "attempt_limit_check": "a task needs at least one attempt",
    "time_limit_s_check": "a time limit must be above 0 and at most ten years",
    "due_time_check": "a time must lie in the years 2 to 9998",
    "worker_metadata_check": "the metadata of a worker must be an object of at most 4,096 bytes and 20 levels",
    "workers_lease_s_check": "a lease must have 1 to 86,400 seconds",
    "workers_concurrency_check": "concurrency must be 1 to 10,000",
    "error_code_check": "an error code must have at most 100 characters",
    "workers_token": "this token is used by another worker already",
    "workers_join_token": "this token is used by another worker already",
    "workers_pkey": "a worker with this id exists already",
    "tokens_name": "a token with this name exists already",
    "tokens_hash_key": "this token exists already",
}
_TOO_LARGE = (
    asyncpg.NumericValueOutOfRangeError,
    asyncpg.DatetimeFieldOverflowError,
    asyncpg.IntervalFieldOverflowError,
)
# The codec of asyncpg names the position of an argument, and our functions do not show their callers positions.
_ARGUMENT = re.compile(r"\$\d+")


def explain_refused_value(doing: str, error: asyncpg.PostgresError | Exception) -> BadInput:
    """Raises the error itself if the caller cannot have caused it."""
    if isinstance(error, asyncpg.NotNullViolationError | asyncpg.ForeignKeyViolationError):
        raise error
    return BadInput(f"{doing}: {_reason(error).rstrip('.')}.")


def _reason(error: Exception) -> str:
    if isinstance(error, asyncpg.InvalidParameterValueError | asyncpg.ProgramLimitExceededError):
        # Raised by our functions; PostgreSQL itself raises some of them for indexes and settings.
        return words(error) if _is_ours(error) else "a value is too large or not allowed"
    if isinstance(error, asyncpg.IntegrityConstraintViolationError):
        rule = _RULES.get(str(getattr(error, "constraint_name", "") or ""))
        if rule is None and isinstance(error, asyncpg.UniqueViolationError):
            rule = "it exists already"
        return rule or "a value is outside of its limits"
    if isinstance(error, _TOO_LARGE) or "range" in str(error):
        return "a number or time is out of range"
    if isinstance(error, asyncpg.UntranslatableCharacterError | asyncpg.CharacterNotInRepertoireError):
        return "a text has a character that cannot be stored, such as NUL"
    if isinstance(error, asyncpg.InvalidTextRepresentationError):
        return "a value is not valid JSON, or not of the expected type"
    return "a value has the wrong type or cannot be stored"


def _is_ours(error: Exception) -> bool:
    """Whether a PL/pgSQL function raised it with a message of its own."""
    context = str(getattr(error, "context", "") or "")
    return "at RAISE" in context and _ARGUMENT.search(words(error)) is None
