"""Changes to a fleet's settings, written as name=value: for replays and simulations."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig


def with_changes(settings: FleetConfig, changes: Sequence[str]) -> FleetConfig:
    """The settings with changes, each as name=value. BadInput if a name or value is invalid."""
    if not changes:
        return settings
    given: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise BadInput(f"{change[:100]!r} is not a fleet setting: write name=value, for example max_workers=3.")
        if name not in FleetConfig.model_fields:
            near = get_close_matches(name[:100], FleetConfig.model_fields, n=1)
            hint = f": did you mean {near[0]}?" if near else "."
            raise BadInput(f"{name[:100]!r} is not a fleet setting{hint}")
        given[name] = value
    try:
        return FleetConfig.model_validate(settings.model_dump() | given)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the settings"
        raise BadInput(f"{where}: {problem['msg'].removeprefix('Value error, ').rstrip('.')}.") from None
