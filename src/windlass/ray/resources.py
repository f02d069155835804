"""What a task needs of a node: by its queue's settings, or by its own word."""

import json
from typing import Any

from pydantic import ValidationError

from windlass.model.errors import BadInput
from windlass.model.node import Resources
from windlass.model.ray import RaySettings, TaskNeeds
from windlass.model.task import Claim

# A task whose payload is an object with this key says itself what it needs: {"num_cpus": 4, "resources": {"disk": 1}}.
KEY = "ray_resources"


def needs_of(claim: Claim, settings: RaySettings) -> Resources:
    """Raises BadInput if the task's own word is none."""
    usual = settings.needs_of(claim.queue)
    # Nearly all payloads need not be read to see that.
    if f'"{KEY}"' not in claim.payload:
        return usual.as_resources()
    try:
        payload: Any = json.loads(claim.payload)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the task's payload, and its {KEY}, is JSON that Python does not read ({error}).") from None
    own = payload.get(KEY) if isinstance(payload, dict) else None
    if own is None:
        return usual.as_resources()
    try:
        return TaskNeeds.model_validate(own).as_resources()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join([KEY, *map(str, problem["loc"])])
        raise BadInput(f"the task's {where} cannot be used: {problem['msg']}.") from None
