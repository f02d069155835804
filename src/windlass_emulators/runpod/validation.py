"""What clients may send. All violations of the published schemas are said in one answer (422), each with its place.

Rules between fields are not the schema's: whoever reads a body raises those himself (400).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from windlass_emulators.http import Json
from windlass_emulators.runpod.errors import RunpodApiError

CUDA_VERSION = re.compile(r"\d+\.\d+")
_KINDS: Mapping[type, str] = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}


class Body:
    """A JSON object, read field by field. Whatever was not read is not allowed; `finish` raises Problem."""

    def __init__(self, value: Json, place: str = "$", errors: list[str] | None = None) -> None:
        self._value = value
        self._place = place
        self.errors: list[str] = [] if errors is None else errors
        self._read: set[str] = set()

    def has(self, field: str) -> bool:
        return field in self._value

    def refuse(self, message: str, field: str | None = None) -> None:
        self.errors.append(f"{self._place if field is None else f'{self._place}.{field}'}: {message}")

    def close(self) -> None:
        """Nothing else may be here."""
        if unknown := sorted(set(self._value) - self._read):
            names = ", ".join(f"'{name}'" for name in unknown)
            self.refuse(f"additional properties {names} not allowed")

    def finish(self) -> None:
        self.close()
        if self.errors:
            raise RunpodApiError(422, None, self.errors)

    # ------------------------------------------------------------------------------------------------ any field

    def text(
        self, field: str, *, is_required: bool = False, is_long: bool = True, pattern: re.Pattern[str] | None = None
    ) -> str | None:
        """`is_long`: not empty."""
        value = self._of(field, str, is_required)
        if value is None:
            return None
        if is_long and not value:
            self.refuse("length must be >= 1, but got 0", field)
        if pattern is not None and not pattern.fullmatch(value):
            self.refuse(f"'{value}' does not match pattern '^{pattern.pattern}$'", field)
        return str(value)

    def one_of(self, field: str, choices: tuple[str, ...], *, is_required: bool = False) -> str | None:
        value = self.text(field, is_required=is_required, is_long=False)
        if value is not None and value not in choices:
            names = ", ".join(f"'{choice}'" for choice in choices)
            self.refuse(f"value must be one of {names}", field)
        return value

    def number(
        self, field: str, *, least: int | None = None, most: int | None = None, is_required: bool = False
    ) -> int | None:
        value = self._of(field, int, is_required)
        if value is None:
            return None
        if least is not None and value < least:
            self.refuse(f"must be >= {least} but found {value}", field)
        if most is not None and value > most:
            self.refuse(f"must be <= {most} but found {value}", field)
        return int(value)

    def flag(self, field: str) -> bool | None:
        value = self._of(field, bool, False)
        return None if value is None else bool(value)

    def texts(
        self, field: str, *, pattern: re.Pattern[str] | None = None, is_required: bool = False
    ) -> list[str] | None:
        values = self._of(field, list, is_required)
        if values is None:
            return None
        for number, value in enumerate(values):
            if not isinstance(value, str):
                self.refuse(f"got {_kind_of(value)}, want string", f"{field}[{number}]")
            elif pattern is not None and not pattern.fullmatch(value):
                self.refuse(f"'{value}' does not match pattern '^{pattern.pattern}$'", f"{field}[{number}]")
        return [value for value in values if isinstance(value, str)]

    def text_map(self, field: str) -> dict[str, str] | None:
        values = self._of(field, dict, False)
        if values is None:
            return None
        for name, value in values.items():
            if not isinstance(value, str):
                self.refuse(f"got {_kind_of(value)}, want string", f"{field}.{name}")
        return {name: str(value) for name, value in values.items()}

    def text_or_null(self, field: str) -> str | None:
        if self._value.get(field) is None:
            self._read.add(field)
            return None
        return self.text(field, is_long=False)

    def object(self, field: str) -> "Body | None":
        value = self._of(field, dict, False)
        return None if value is None else Body(value, f"{self._place}.{field}", self.errors)

    def objects(self, field: str, read: Callable[["Body"], Any], *, most: int) -> list[Any] | None:
        values = self._of(field, list, False)
        if values is None:
            return None
        if len(values) > most:
            self.refuse(f"maxItems: got {len(values)}, want {most}", field)
        found = []
        for number, value in enumerate(values):
            if isinstance(value, dict):
                found.append(read(Body(value, f"{self._place}.{field}[{number}]", self.errors)))
            else:
                self.refuse(f"got {_kind_of(value)}, want object", f"{field}[{number}]")
        return found

    def _of(self, field: str, kind: type, is_required: bool) -> Any:
        self._read.add(field)
        if field not in self._value:
            if is_required:
                self.refuse(f"missing property '{field}'")
            return None
        value = self._value[field]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(f"got {_kind_of(value)}, want {_KINDS[kind]}", field)
            return None
        return value


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    return "number" if isinstance(value, float) else _KINDS.get(type(value), "value")
