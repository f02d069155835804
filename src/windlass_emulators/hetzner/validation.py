"""What clients may send. Everything that is wrong with a request is said in one answer, field by field."""

import ipaddress
import re
from collections.abc import Callable
from typing import Any

from windlass_emulators.hetzner.errors import HetznerApiError, invalid
from windlass_emulators.http import Json

MAX_USER_DATA_BYTES = 32 * 1024
MAX_LABEL_CHARACTERS = 63
MAX_PREFIX_CHARACTERS = 253
MAX_NAME_CHARACTERS = 128
MAX_HOSTNAME_CHARACTERS = 253

_HOSTNAME_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = re.compile(rf"{_HOSTNAME_LABEL}(?:\.{_HOSTNAME_LABEL})*")
_LABEL_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_RESERVED_PREFIX = "hetzner.cloud"


class Inputs:
    """A request's body, read field by field. `finish` raises ApiError if anything was wrong with it."""

    def __init__(self, body: Json) -> None:
        self._body = body
        self.problems: list[tuple[str, str]] = []

    def refuse(self, field: str, message: str) -> None:
        self.problems.append((field, message))

    def finish(self) -> None:
        if self.problems:
            raise invalid(self.problems)

    def has(self, field: str) -> bool:
        return self._body.get(field) is not None

    def raw(self, field: str) -> Any:
        return self._body.get(field)

    # ------------------------------------------------------------------------------------------------ any field

    def text(self, field: str, *, is_required: bool = False, choices: tuple[str, ...] = ()) -> str:
        value = self._of_type(field, str, is_required)
        if value is None:
            return ""
        if is_required and not value:
            self.refuse(field, "must not be empty")
        if choices and value not in choices:
            self.refuse(field, f"must be one of {', '.join(choices)}")
        return str(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self._of_type(field, bool, False)
        return default if value is None else bool(value)

    def number(self, field: str, *, is_required: bool = False) -> int | None:
        value = self._of_type(field, int, is_required)
        return None if value is None else int(value)

    def items(self, field: str, kind: type | tuple[type, ...]) -> list[Any]:
        values = self._of_type(field, list, False) or []
        if any(not isinstance(value, kind) or isinstance(value, bool) for value in values):
            self.refuse(field, "has an entry of the wrong type")
            return []
        return list(values)

    def object(self, field: str) -> Json:
        value = self._of_type(field, dict, False)
        return {} if value is None else dict(value)

    def id_or_name(self, field: str, *, is_required: bool = False) -> str | int | None:
        value = self._body.get(field)
        if value is None or value == "":
            if is_required:
                self.refuse(field, "is required")
            return None
        if isinstance(value, bool) or not isinstance(value, str | int):
            self.refuse(field, "must be a name or an ID")
            return None
        return value

    def _of_type(self, field: str, kind: type, is_required: bool) -> Any:
        value = self._body.get(field)
        if value is None:
            if is_required:
                self.refuse(field, "is required")
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(field, f"must be of type {kind.__name__}")
            return None
        return value

    # ---------------------------------------------------------------------------------------- fields with rules

    def hostname(self, field: str = "name", *, is_required: bool) -> str:
        name = self.text(field, is_required=is_required)
        if name and (len(name) > MAX_HOSTNAME_CHARACTERS or not _HOSTNAME.fullmatch(name)):
            self.refuse(field, "must be a valid hostname as per RFC 1123")
        return name

    def name(self, *, is_required: bool) -> str:
        name = self.text("name", is_required=is_required)
        if len(name) > MAX_NAME_CHARACTERS:
            self.refuse("name", "is too long")
        return name

    def labels(self) -> dict[str, str]:
        labels = self.object("labels")
        for key, value in labels.items():
            if problem := _label_problem(key, value):
                self.refuse("labels", problem)
        return labels

    def user_data(self) -> str:
        user_data = self.text("user_data")
        if len(user_data.encode()) > MAX_USER_DATA_BYTES:
            self.refuse("user_data", "is too long (maximum 32KiB)")
        return user_data

    def ip_range(self, field: str, *, is_required: bool) -> str:
        return self._parsed(field, lambda text: str(ipaddress.IPv4Network(text)), is_required)

    def ip(self, field: str) -> str | None:
        return self._parsed(field, lambda text: str(ipaddress.IPv4Address(text)), False) or None

    def _parsed(self, field: str, parse: Callable[[str], str], is_required: bool) -> str:
        text = self.text(field, is_required=is_required)
        if not text:
            return ""
        try:
            return parse(text)
        except ValueError:
            self.refuse(field, "is not valid")
            return ""


def _label_problem(key: str, value: object) -> str | None:
    prefix, slash, name = key.rpartition("/")
    if len(name) > MAX_LABEL_CHARACTERS or not _LABEL_PART.fullmatch(name):
        return f"key '{key}' is not valid"
    if slash and (len(prefix) > MAX_PREFIX_CHARACTERS or not _HOSTNAME.fullmatch(prefix) or prefix == _RESERVED_PREFIX):
        return f"key '{key}' has an invalid prefix"
    if not isinstance(value, str):
        return f"value of '{key}' is not a string"
    if len(value) > MAX_LABEL_CHARACTERS or (value and not _LABEL_PART.fullmatch(value)):
        return f"value of '{key}' is not valid"
    return None


def number_in_query(field: str, text: str, default: int) -> int:
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise invalid([(field, "must be a positive number")])
    return int(text)


def unsupported(what: str) -> HetznerApiError:
    return HetznerApiError("unsupported_error", f"the emulator does not do this: {what}", {})
