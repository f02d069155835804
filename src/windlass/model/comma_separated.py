"""Lists that an environment variable gives as text: items, separated by commas."""

from typing import Annotated, Any

from pydantic import BeforeValidator


def _split(value: Any) -> Any:
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


TextList = Annotated[tuple[str, ...], BeforeValidator(_split)]
NumberList = Annotated[tuple[int, ...], BeforeValidator(_split)]
