"""Requests that go wrong on script: which, how, and how often. What else can go wrong is a vendor's own."""

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from windlass_emulators.http import Json, NoAnswer

# A client that waits this long without a time-out of its own deserves to be told.
DEFAULT_HELD_S = 30.0
# Scripts are written by people and tests; more than this is a loop that forgot to clear.
MAX_SCRIPTED = 10_000


@dataclass(slots=True)
class Scripted:
    """What happens to the next requests that match."""

    method: str | None
    path: str
    # What is raised to answer it. None: nobody answers.
    error: Exception | None
    # The same as a word or a number, for whoever looks at the script.
    answers: str | int | None
    takes_effect: bool
    held_s: float = DEFAULT_HELD_S
    times: int = 1
    # Matching requests that are let through first.
    skip: int = 0
    until: datetime | None = None

    def matches(self, method: str, path: str) -> bool:
        return self.method in (None, method) and re.fullmatch(self.path, path) is not None

    def fail(self) -> None:
        """Raises what is scripted."""
        raise self.error or NoAnswer(self.held_s)

    def to_json(self) -> Json:
        return {
            "method": self.method,
            "path": self.path,
            "answers": self.answers,
            "takes_effect": self.takes_effect,
            "times": self.times,
            "skip": self.skip,
            "until": self.until.isoformat() if self.until else None,
        }


@dataclass(slots=True)
class Script:
    entries: list[Scripted] = field(default_factory=list)

    def add(self, scripted: Scripted) -> None:
        if len(self.entries) >= MAX_SCRIPTED:
            raise ValueError(f"there are {MAX_SCRIPTED} faults already; clear() them")
        self.entries.append(scripted)

    def take(self, method: str, path: str, now: datetime) -> Scripted | None:
        """What is to happen to this request; counted."""
        self.entries = [each for each in self.entries if each.until is None or each.until > now]
        for each in self.entries:
            if not each.matches(method, path):
                continue
            if each.skip > 0:
                each.skip -= 1
                continue
            each.times -= 1
            if each.times <= 0:
                self.entries.remove(each)
            return each
        return None

    def to_json(self) -> list[Json]:
        return [each.to_json() for each in self.entries]


def check_one(answer: object | None, *time_outs: bool) -> None:
    if sum((answer is not None, *time_outs)) != 1:
        raise ValueError("say what happens: an error, or one way to time out")


def call_by_name(faults: object, methods: Sequence[str], body: bytes) -> str | None:
    """Calls the method that a request's body names, with its arguments; returns what is wrong with it, if anything."""
    try:
        arguments = json.loads(body)
    except ValueError:
        return "the body is not JSON"
    name = arguments.pop("fault", None) if isinstance(arguments, dict) else None
    if not isinstance(name, str) or name not in methods:
        return f"say which fault: one of {', '.join(methods)}"
    method = getattr(faults, name)
    try:
        inspect.signature(method).bind(**arguments)
        method(**arguments)
    except (TypeError, ValueError) as error:
        return f"{name}: {error}"
    return None
