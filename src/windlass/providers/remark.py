"""What `windlass doctor` is told about a provider: one thing, and what to do about it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remark:
    check: str
    what: str
    # Empty where all is well.
    do: str = ""
    is_grave: bool = False
