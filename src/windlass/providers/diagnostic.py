"""What `windlass doctor` is told about a provider: one thing, and what to do about it."""

from dataclasses import dataclass

# What to do about machines of ours whose fleet is not configured.
OF_OTHER_FLEETS = "`windlass up` lets those go whose workers it knows; delete the others, or configure the fleets again"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    check: str
    what: str
    # Empty where all is well.
    do: str = ""
    is_grave: bool = False
