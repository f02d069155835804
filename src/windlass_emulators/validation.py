"""Request bodies as pydantic models. Each vendor renders the violations in its own words."""

from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from windlass_emulators.http import Json, VendorApiError

BodyT = TypeVar("BodyT", bound="VendorRequestBody")


class VendorRequestBody(BaseModel):
    """Strict: no value is converted to another type. `model_fields_set` tells which fields the client sent."""

    model_config = ConfigDict(strict=True)


def _reject_null(value: object) -> object:
    if value is None:
        raise PydanticCustomError("null", "must not be null")
    return value


# For an optional field that may be absent, but not null.
NotNull = BeforeValidator(_reject_null)
OptionalFlag = Annotated[bool | None, NotNull]


def parse_model(model: type[BodyT], body: Json, refuse: Callable[[list[ErrorDetails]], VendorApiError]) -> BodyT:
    """Raises the vendor's error with all violations."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise refuse(error.errors(include_url=False)) from error
