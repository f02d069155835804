"""Request bodies of the Hetzner API: field types with Hetzner's rules, and violations in Hetzner's format."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import ErrorDetails

from windlass_emulators.hetzner.errors import HetznerApiError, invalid
from windlass_emulators.http import Json
from windlass_emulators.validation import BodyT, VendorRequestBody, parse_model

MAX_USER_DATA_BYTES = 32 * 1024
MAX_LABEL_CHARACTERS = 63
MAX_PREFIX_CHARACTERS = 253
MAX_HOSTNAME_CHARACTERS = 253
_RESERVED_PREFIX = "hetzner.cloud"

_HOSTNAME_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = re.compile(rf"{_HOSTNAME_LABEL}(?:\.{_HOSTNAME_LABEL})*")
_LABEL_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")

# By pydantic's error type.
_MESSAGES = {
    "missing": "is required",
    "string_too_short": "must not be empty",
    "string_too_long": "is too long",
    "string_type": "must be of type str",
    "int_type": "must be of type int",
    "bool_type": "must be of type bool",
    "list_type": "must be of type list",
    "dict_type": "must be of type dict",
    "model_type": "must be of type dict",
}


class HetznerBody(VendorRequestBody):
    """Unknown fields are ignored. Null means absent."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


def parse_hetzner_body(model: type[BodyT], body: Json) -> BodyT:
    """Raises HetznerApiError with all violations, by field."""
    return parse_model(model, body, _refuse)


def _refuse(errors: list[ErrorDetails]) -> HetznerApiError:
    violations: dict[tuple[str, str], None] = {}
    for error in errors:
        place = error["loc"]
        message = _MESSAGES.get(error["type"]) or error["msg"].removeprefix("Value error, ")
        index = next((number for number, part in enumerate(place) if isinstance(part, int)), None)
        if index is not None:
            place, message = place[:index], "has an entry of the wrong type"
        violations[".".join(str(part) for part in place), message] = None
    return invalid(violations)


def _check_hostname(name: str) -> str:
    if name and (len(name) > MAX_HOSTNAME_CHARACTERS or not _HOSTNAME.fullmatch(name)):
        raise ValueError("must be a valid hostname as per RFC 1123")
    return name


def _check_labels(labels: dict[str, Any]) -> dict[str, str]:
    for key, value in labels.items():
        prefix, slash, name = key.rpartition("/")
        if len(name) > MAX_LABEL_CHARACTERS or not _LABEL_PART.fullmatch(name):
            raise ValueError(f"key '{key}' is not valid")
        is_prefix = len(prefix) <= MAX_PREFIX_CHARACTERS and _HOSTNAME.fullmatch(prefix) and prefix != _RESERVED_PREFIX
        if slash and not is_prefix:
            raise ValueError(f"key '{key}' has an invalid prefix")
        if not isinstance(value, str):
            raise ValueError(f"value of '{key}' is not a string")  # noqa: TRY004 - pydantic reports ValueError only
        if len(value) > MAX_LABEL_CHARACTERS or (value and not _LABEL_PART.fullmatch(value)):
            raise ValueError(f"value of '{key}' is not valid")
    return labels


def _check_user_data(text: str) -> str:
    if len(text.encode()) > MAX_USER_DATA_BYTES:
        raise ValueError("is too long (maximum 32KiB)")
    return text


def _check_id_or_name(value: Any) -> Any:
    if value == "":
        raise ValueError("is required")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("must be a name or an ID")  # noqa: TRY004 - pydantic reports ValueError only
    return value


Hostname = Annotated[str, AfterValidator(_check_hostname)]
RequiredHostname = Annotated[Hostname, Field(min_length=1)]
ResourceName = Annotated[str, Field(max_length=128)]
RequiredName = Annotated[ResourceName, Field(min_length=1)]
Labels = Annotated[dict[str, Any], AfterValidator(_check_labels)]
UserData = Annotated[str, AfterValidator(_check_user_data)]
IdOrName = Annotated[Any, AfterValidator(_check_id_or_name)]
