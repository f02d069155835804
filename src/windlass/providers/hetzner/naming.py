"""Names and labels of servers. Pure.

A server belongs to a fleet by its labels. `windlass-id` identifies the database, so that two installations in one
project never touch each other's servers. Server names are unique in a project, so they end with a part of that id.
"""

import hashlib
import re
from collections.abc import Mapping

from windlass.model.bootstrap import MAX_USER_DATA_BYTES
from windlass.model.errors import InvalidRequest
from windlass.model.hetzner import problem_of_label
from windlass.model.machine import MachineRequest

MANAGED_BY = "managed-by"
INSTALLATION = "windlass-id"
FLEET = "windlass-fleet"
WORKER = "windlass-worker"
SLOT = "windlass-slot"
MAX_NAME = 63
# A host name per RFC 1123.
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.-]")
_NAME_SUFFIX_LENGTH = 6


def fleet_label(fleet: str) -> str:
    """A fleet's name as a label value. A name that is not a valid value is replaced by a similar, unique one."""
    if problem_of_label(FLEET, fleet) is None:
        return fleet
    digest = hashlib.sha256(fleet.encode()).hexdigest()[:8]
    return f"{_NOT_IN_LABELS.sub('-', fleet).strip('_.-')[:50]}-{digest}".lstrip("-")


def fleet_labels(installation: str, fleet: str) -> dict[str, str]:
    """The labels that all servers of a fleet have in common."""
    return {MANAGED_BY: "windlass", INSTALLATION: installation, FLEET: fleet_label(fleet)}


def label_selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def server_labels(common: Mapping[str, str], request: MachineRequest, extra: Mapping[str, str]) -> dict[str, str]:
    """All labels of one server. Raises InvalidRequest if the vendor would reject one."""
    labels = {**extra, **common, WORKER: request.name, SLOT: str(request.slot)}
    for key, value in labels.items():
        problem = problem_of_label(key, value)
        if problem is not None:
            raise InvalidRequest(f"creating server {request.name}: {problem}.")
    return labels


def server_name(worker_id: str, installation: str) -> str:
    """Raises InvalidRequest if the result is not a host name."""
    name = f"{worker_id}-{installation[:_NAME_SUFFIX_LENGTH]}"
    if len(name) > MAX_NAME or _HOST.fullmatch(name) is None:
        raise InvalidRequest(
            f"creating server {worker_id}: {name!r} is not a valid server name (lower case letters, digits and "
            f"dashes, at most {MAX_NAME}). Rename the fleet accordingly, or give it a shorter name."
        )
    return name


def check_user_data(worker_id: str, user_data: str) -> str:
    """Raises InvalidRequest if the vendor would reject it."""
    size = len(user_data.encode())
    if size > MAX_USER_DATA_BYTES:
        raise InvalidRequest(
            f"creating server {worker_id}: user_data has {size:,} bytes, at most {MAX_USER_DATA_BYTES:,} are allowed. "
            "Shorten the fleet's bootstrap settings."
        )
    return user_data
