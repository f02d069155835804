"""Request bodies and query parameters of the Runpod API.

Violations of the published schema are reported together in one 422, each with its place. Rules between fields are not
part of the schema: endpoints check those and answer 400.
"""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic_core import ErrorDetails

from windlass_emulators.http import ApiCall, Json
from windlass_emulators.runpod.errors import RunpodApiError
from windlass_emulators.validation import BodyT, VendorRequestBody, parse_model

_TYPES = {"str": "string", "int": "integer", "bool": "boolean", "list": "array", "dict": "object", "float": "number"}
# By pydantic's error type: the JSON type that the schema wants.
_WANTED = {
    "string_type": "string",
    "int_type": "integer",
    "bool_type": "boolean",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
}


class RunpodBody(VendorRequestBody):
    """Unknown fields are violations."""

    model_config = ConfigDict(extra="forbid")


def parse_runpod_body(model: type[BodyT], body: Json) -> BodyT:
    """Raises RunpodApiError with all violations."""
    return parse_model(model, body, _refuse)


def _refuse(errors: list[ErrorDetails]) -> RunpodApiError:
    messages: list[str] = []
    unknown: dict[str, list[str]] = {}
    for error in errors:
        *parents, field = error["loc"]
        if error["type"] == "extra_forbidden":
            unknown.setdefault(_place(parents), []).append(f"'{field}'")
        elif error["type"] == "missing":
            messages.append(f"{_place(parents)}: missing property '{field}'")
        else:
            messages.append(f"{_place(error['loc'])}: {_describe(error)}")
    for place, names in unknown.items():
        messages.append(f"{place}: additional properties {', '.join(sorted(names))} not allowed")
    return RunpodApiError(422, None, messages)


def _place(loc: Sequence[int | str]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)


def _describe(error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _WANTED:
        return f"got {_json_type(value)}, want {_WANTED[kind]}"
    match kind:
        case "null":
            return "got null"
        case "greater_than_equal":
            return f"must be >= {context['ge']} but found {value}"
        case "less_than_equal":
            return f"must be <= {context['le']} but found {value}"
        case "string_too_short":
            return f"length must be >= {context['min_length']}, but got {len(value)}"
        case "string_pattern_mismatch":
            return f"'{value}' does not match pattern '{context['pattern']}'"
        case "literal_error":
            return f"value must be one of {context['expected'].replace(' or ', ', ')}"
        case "too_long":
            return f"maxItems: got {context['actual_length']}, want {context['max_length']}"
        case _:
            return error["msg"]


def _json_type(value: object) -> str:
    return "null" if value is None else _TYPES.get(type(value).__name__, "value")


NonEmptyText = Annotated[str, Field(min_length=1)]
CudaVersion = Annotated[str, Field(pattern=r"^\d+\.\d+$")]


# ---------------------------------------------------------------------------------------------------------- queries


def _invalid(name: str, message: str) -> RunpodApiError:
    return RunpodApiError(422, None, [f"query.{name}: {message}"])


def query_words(call: ApiCall, name: str, choices: Sequence[str] = (), pattern: str | None = None) -> list[str]:
    """A comma-separated list. Raises RunpodApiError."""
    words = [word for word in call.query.get(name, "").split(",") if word]
    for word in words:
        if choices and word not in choices:
            raise _invalid(name, f"value must be one of {', '.join(choices)}")
        if pattern and not re.fullmatch(pattern, word):
            raise _invalid(name, f"'{word}' does not match pattern '^{pattern}$'")
    return words


def query_choice(call: ApiCall, name: str, choices: Sequence[str], default: str) -> str:
    value = call.query.get(name, default)
    if value not in choices:
        raise _invalid(name, f"value must be one of {', '.join(choices)}")
    return value


def query_number(call: ApiCall, name: str, default: int, *, least: int) -> int:
    text = call.query.get(name, str(default))
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise _invalid(name, f"'{text}' is not an integer")
    if int(text) < least:
        raise _invalid(name, f"must be >= {least}")
    return int(text)
