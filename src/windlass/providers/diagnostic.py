"""One result of a `windlass doctor` check of a provider."""

from dataclasses import dataclass

# Advice for machines of this database whose fleet is not configured.
UNCONFIGURED_FLEETS_ADVICE = (
    "`windlass up` deletes those whose workers are in the database; delete the others in the provider's console, or "
    "configure the fleets again"
)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    # What was checked.
    check: str
    message: str
    # What to do. Empty if the check passed.
    advice: str = ""
    # No worker can be spawned until this is fixed. Otherwise a warning.
    is_error: bool = False
