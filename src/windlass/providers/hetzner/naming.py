"""How our servers are told from all others in a project: by labels. And what may be called what. Pure.

`windlass-id` names the database, so that two installations in one project never touch each other's servers. Server
names are unique in a project, so they end with a part of it.
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
# RFC 1123: what can be a host's name.
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.-]")
_MARK_LENGTH = 6


def installation_of(identity: str) -> str:
    """`identity`: what tells one database from another. No secret can be read from the result."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def fleet_label(fleet: str) -> str:
    """A fleet's name as a label's value: its own where that may be one, else one like it that is no other fleet's."""
    if problem_of_label(FLEET, fleet) is None:
        return fleet
    mark = hashlib.sha256(fleet.encode()).hexdigest()[:8]
    return f"{_NOT_IN_LABELS.sub('-', fleet).strip('_.-')[:50]}-{mark}".lstrip("-")


def fleet_labels(installation: str, fleet: str) -> dict[str, str]:
    """What all servers of a fleet carry, and nobody else's."""
    return {MANAGED_BY: "windlass", INSTALLATION: installation, FLEET: fleet_label(fleet)}


def selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def labels_of(fleet_wide: Mapping[str, str], request: MachineRequest, extra: Mapping[str, str]) -> dict[str, str]:
    """All labels of one server. Raises InvalidRequest if the vendor would not accept them."""
    labels = {**extra, **fleet_wide, WORKER: request.name, SLOT: str(request.slot)}
    for key, value in labels.items():
        problem = problem_of_label(key, value)
        if problem is not None:
            raise InvalidRequest(f"creating server {request.name}: {problem}.")
    return labels


def server_name(worker_id: str, installation: str) -> str:
    """Raises InvalidRequest if it cannot be a host's name."""
    name = f"{worker_id}-{installation[:_MARK_LENGTH]}"
    if len(name) > MAX_NAME or _HOST.fullmatch(name) is None:
        raise InvalidRequest(
            f"creating server {worker_id}: {name!r} cannot be a server's name: lower case letters, digits and dashes "
            f"between, at most {MAX_NAME}: give the fleet such a name, and a shorter one."
        )
    return name


def check_user_data(worker_id: str, user_data: str) -> str:
    """Whoever rendered it: a request that the vendor would not take is not sent. Raises InvalidRequest."""
    size = len(user_data.encode())
    if size > MAX_USER_DATA_BYTES:
        raise InvalidRequest(
            f"creating server {worker_id}: its user_data has {size:,} bytes and may have {MAX_USER_DATA_BYTES:,}: "
            "shorten what the fleet's bootstrap settings put into it."
        )
    return user_data
