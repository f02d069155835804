"""Fault injection that all emulated vendors share: scripted responses, missing capacity, stale lists.

A scripted fault applies to the next matching requests and is used up by them. Missing capacity and a list lag last
until they are withdrawn or expire. Every method named in `METHODS` can also be called over HTTP with its arguments, by
POST to /_emulator/faults.
"""

import inspect
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import ClassVar

from windlass_emulators.http import Json, NoAnswer

# Longer than the time-out of a well-behaved client.
DEFAULT_HELD_S = 30.0
# A script with more faults than this comes from a loop that never calls clear().
MAX_SCRIPTED = 10_000


@dataclass(slots=True)
class ScriptedFault:
    """The response that the next matching requests get."""

    method: str | None
    # A regular expression for the whole path.
    path: str
    # The error to raise. None: no answer at all.
    error: Exception | None
    # The same as a code or a status, for display.
    answers: str | int | None
    # Whether the request is executed before it fails.
    takes_effect: bool
    held_s: float = DEFAULT_HELD_S
    times: int = 1
    # Number of matching requests that pass first.
    skip: int = 0
    until: datetime | None = None

    def fail(self) -> None:
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


@dataclass(frozen=True, slots=True)
class Shortage:
    """Missing capacity of a machine type in a place."""

    # Whether the catalog shows it too. The vendors' catalogs are sometimes out of date.
    is_announced: bool
    until: datetime | None
    code: str = ""


@dataclass
class FaultScript:
    now: datetime
    script: list[ScriptedFault] = field(default_factory=list)
    # By machine type and place; "*" stands for all.
    shortages: dict[tuple[str, ...], Shortage] = field(default_factory=dict)
    lag_s: float = 0.0

    # The methods that can be called over HTTP.
    METHODS: ClassVar[tuple[str, ...]] = ()

    def list_lags(self, by_s: float) -> None:
        """Lists show the state of this many seconds ago. Single resources are always up to date."""
        self.lag_s = by_s

    def clear(self) -> None:
        """Withdraw all faults. Machines that were created faulty stay faulty."""
        self.script.clear()
        self.shortages.clear()
        self.lag_s = 0.0

    def take(self, method: str, path: str) -> ScriptedFault | None:
        """The fault that applies to this request, if any. Uses up one of its `times`."""
        self.script = [each for each in self.script if each.until is None or each.until > self.now]
        for each in self.script:
            if each.method not in (None, method) or not re.fullmatch(each.path, path):
                continue
            if each.skip > 0:
                each.skip -= 1
                continue
            each.times -= 1
            if each.times <= 0:
                self.script.remove(each)
            return each
        return None

    def inject(self, arguments: Json) -> None:
        """Call the method that `fault` names with the other arguments. Raises ValueError or TypeError."""
        arguments = dict(arguments)
        name = arguments.pop("fault", None)
        if name not in self.METHODS:
            raise ValueError(f"unknown fault {name!r}: use one of {', '.join(self.METHODS)}")
        method = getattr(self, str(name))
        try:
            inspect.signature(method).bind(**arguments)
            method(**arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error

    def to_json(self) -> Json:
        return {"scripted": [each.to_json() for each in self.script], "list_lags_by_s": self.lag_s}

    def _add(self, fault: ScriptedFault, for_s: float | None) -> None:
        if len(self.script) >= MAX_SCRIPTED:
            raise ValueError(f"{MAX_SCRIPTED} faults are scripted already; call clear()")
        fault.until = self._expiry(for_s)
        self.script.append(fault)

    def _expiry(self, for_s: float | None) -> datetime | None:
        return None if for_s is None else self.now + timedelta(seconds=for_s)

    def _find_shortage(self, *places: tuple[str, ...]) -> Shortage | None:
        found = [self.shortages[place] for place in places if place in self.shortages]
        return next((each for each in found if each.until is None or each.until > self.now), None)


def check_one_outcome(answer: object | None, *outcomes: bool) -> None:
    if sum((answer is not None, *outcomes)) != 1:
        raise ValueError("give exactly one outcome: an error, or one of the flags")
