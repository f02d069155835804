"""Hides known secrets in structured data before it becomes JSON or a page: in its text, and nowhere else.

`without_secrets_inside` masks the strings of dataclasses, models, mappings and sequences. It changes no number, time,
enumeration or key, and no identifier of ours: ids, names of fleets and queues, codes, versions and addresses. A plan
or an outcome still matches its rows, and a link its page. Identifiers are known by the names of their fields, except
in tables whose names are chosen outside Windlass (`env`, `metadata`), where every string is masked.

`masked_json` walks through the data only if a secret occurs in its JSON, so that it costs little where none does.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from enum import Enum, auto
from functools import cache
from itertools import islice
from types import NoneType
from typing import Any, TypeVar

from pydantic import BaseModel

from windlass.model.redaction import HIDDEN, has_known_secret, without_known_secrets

Value = TypeVar("Value")

# Fields whose strings identify something, or are of a closed set: of the model, HTTP responses and pages.
_IDENTIFIERS = frozenset(
    {
        *("id", "name", "key", "about", "actor", "owner", "created_by", "holder", "component", "target", "choice"),
        *("fleet", "fleets", "queue", "queues", "task_queue", "restart_fleet", "orphaned", "preparing", "failed"),
        *("code", "error_code", "prepare_code", "kind", "cause", "creation", "status", "state", "outcome", "signal"),
        *("role", "roles", "level", "severity", "change", "changes", "period", "action", "unit", "currency"),
        *("provider", "engine", "policy", "prices", "budget_action"),
        *("instance_type", "place", "host", "machine_host", "address", "avoided_hosts", "host_key", "key_hash"),
        *("version", "python_version", "ray_version", "fingerprint", "rejected", "filename", "sha256", "timestamp"),
        # Settings of a fleet with a fixed form: a stored snapshot with another value could not be read again.
        *("handler", "redact", "run_as", "user", "packages", "image", "images", "choices", "ports", "ray_address"),
        *("min_cuda_version", "excluded_data_centers", "excluded_hosts", "volume_path", "storage_path"),
        # Parts of pages: links, and texts without anything from outside.
        *("link", "path", "back", "back_to", "csrf", "next_url", "next_cursor", "chosen", "which", "lists", "ranges"),
        *("kinds", "group", "groups", "colour", "label", "state_label", "link_label", "summary"),
    }
)
_IDENTIFIER_ENDINGS = ("_id", "_at")
_HIDDEN_LINES = re.compile(rf"{re.escape(HIDDEN)}(?:\n{re.escape(HIDDEN)})+")
# Tables whose names come from handlers, vendors and people.
_FOREIGN_TABLES = frozenset({"env", "metadata", "fields", "diagnostics"})
# Tables of words with a fixed form, which a vendor shows too.
_WORD_TABLES = frozenset({"labels"})
_WITHOUT_TEXT = frozenset({bool, int, float, NoneType, datetime})
# Strings that are JSON themselves.
_JSON_TEXTS = frozenset({"version_settings", "settings", "data"})


def masked_json(dump: Callable[[Value], str], value: Value) -> str:
    """`dump` of a value, without known secrets in its strings."""
    text = dump(value)
    return dump(without_secrets_inside(value)) if has_known_secret(text) else text


def without_secrets_inside(value: Any) -> Any:
    """The value with known secrets hidden in its strings. Parts without a secret are the same objects as before."""
    return _masked(value, "", is_foreign=False)


def _masked(value: Any, name: str, *, is_foreign: bool) -> Any:
    """`name`: of the field that contains the value. `is_foreign`: it is in a foreign table, where names say nothing."""
    kind: Any = type(value)
    match _structure_of(kind):
        case _Structure.TEXT:
            return _masked_text(value, "" if is_foreign else name)
        case _Structure.MEMBERS if name not in _WORD_TABLES:
            is_foreign = is_foreign or name in _FOREIGN_TABLES
            members = {key: _masked(each, str(key), is_foreign=is_foreign) for key, each in value.items()}
            return value if all(members[key] is each for key, each in value.items()) else members
        case _Structure.ITEMS:
            return _masked_items(value, name, is_foreign=is_foreign)
        case _Structure.FIELDS:
            changed = {}
            for each in _field_names(kind):
                part = getattr(value, each)
                # Most parts of a snapshot with many workers have no text.
                if type(part) not in _WITHOUT_TEXT:
                    masked = _masked(part, each, is_foreign=is_foreign)
                    if masked is not part and not _is_default(value, each, part):
                        changed[each] = masked
            if not changed:
                return value
            return value.model_copy(update=changed) if isinstance(value, BaseModel) else replace(value, **changed)
    return value


def _masked_text(text: str, name: str) -> str:
    if _is_identifier(name):
        return text
    if name in _JSON_TEXTS and text[:1] in ("{", "["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return without_known_secrets(text)
        masked = without_secrets_inside(found)
        return text if masked is found else json.dumps(masked)
    hidden = without_known_secrets(text)
    # A secret of several lines is hidden once.
    return text if hidden == text else _HIDDEN_LINES.sub(HIDDEN, hidden)


def _masked_items(items: Any, name: str, *, is_foreign: bool) -> Any:
    """A sequence or set. In one of texts, such as lines of output, a secret may continue in the next."""
    if all(type(each) is str for each in items):
        if not is_foreign and _is_identifier(name):
            return items
        # Masking keeps the number of lines.
        lines = iter(without_known_secrets("\n".join(items)).split("\n"))
        masked = ["\n".join(islice(lines, 1 + each.count("\n"))) for each in items]
        is_changed = masked != list(items)
    else:
        masked = [_masked(each, name, is_foreign=is_foreign) for each in items]
        is_changed = any(one is not other for one, other in zip(masked, items, strict=True))
    if not is_changed:
        return items
    return items._make(masked) if hasattr(items, "_make") else type(items)(masked)


def _is_identifier(name: str) -> bool:
    return name in _IDENTIFIERS or name.endswith(_IDENTIFIER_ENDINGS)


def _is_default(owner: Any, name: str, value: Any) -> bool:
    """Whether a setting has its default, a text of ours. Other validators compare it with the default."""
    return isinstance(owner, BaseModel) and value == type(owner).model_fields[name].get_default(
        call_default_factory=True
    )


class _Structure(Enum):
    TEXT = auto()
    MEMBERS = auto()
    ITEMS = auto()
    FIELDS = auto()
    # Numbers, times, enumerations: nothing that can contain a secret.
    OTHER = auto()


@cache
def _structure_of(kind: type) -> _Structure:
    # Enumerations and safe HTML are types derived from str.
    if kind is str:
        return _Structure.TEXT
    if issubclass(kind, Mapping):
        return _Structure.MEMBERS
    if issubclass(kind, list | tuple | set | frozenset):
        return _Structure.ITEMS
    return _Structure.FIELDS if issubclass(kind, BaseModel) or is_dataclass(kind) else _Structure.OTHER


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(kind.model_fields) if issubclass(kind, BaseModel) else tuple(field.name for field in fields(kind))
