"""The resources that a task needs: from the settings of its queue, or from its payload."""

from typing import Any

from pydantic import ValidationError

from windlass.model.errors import BadInput
from windlass.model.node import Resources
from windlass.model.ray import RaySettings, TaskNeeds
from windlass.model.task import Claim, parse_json

# An object payload with this key overrides the settings: {"ray_resources": {"num_cpus": 4, "resources": {"disk": 1}}}.
KEY = "ray_resources"


def resolve_needs(claim: Claim, settings: RaySettings) -> Resources:
    """Raises BadInput if the payload's needs are not valid."""
    default = settings.needs_of(claim.queue)
    # Saves parsing nearly all payloads.
    if f'"{KEY}"' not in claim.payload:
        return default.as_resources()
    try:
        payload: Any = parse_json(claim.payload)
    except ValueError as error:
        raise BadInput(f"cannot read {KEY}: cannot parse the payload ({error}).") from None
    needs = payload.get(KEY) if isinstance(payload, dict) else None
    if needs is None:
        return default.as_resources()
    try:
        return TaskNeeds.model_validate(needs).as_resources()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join([KEY, *map(str, problem["loc"])])
        raise BadInput(f"invalid {field} in the task's payload: {problem['msg']}.") from None
