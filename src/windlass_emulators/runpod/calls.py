"""One request on its way through the emulator, and what a query may say."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from windlass_emulators.http import Json
from windlass_emulators.runpod.errors import RunpodApiError
from windlass_emulators.runpod.validation import Body


@dataclass(frozen=True, slots=True)
class RunpodCall:
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]
    body: Json
    # What stands in its path in place of {id}.
    id: str

    @property
    def form(self) -> Body:
        return Body(self.body)

    def has(self, name: str) -> bool:
        return any(key == name for key, _ in self.query)

    def asked(self, name: str) -> str | None:
        values = [value for key, value in self.query if key == name]
        return values[-1] if values else None

    def words(self, name: str, choices: Sequence[str] = (), pattern: str | None = None) -> list[str]:
        """A list with commas. Raises Problem."""
        text = self.asked(name)
        words = [word for word in text.split(",") if word] if text else []
        for word in words:
            if choices and word not in choices:
                raise _invalid(name, f"value must be one of {', '.join(choices)}")
            if pattern and not re.fullmatch(pattern, word):
                raise _invalid(name, f"'{word}' does not match pattern '^{pattern}$'")
        return words

    def one_of(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self.asked(name)
        if value is None:
            return default
        if value not in choices:
            raise _invalid(name, f"value must be one of {', '.join(choices)}")
        return value

    def number(self, name: str, default: int, *, least: int, most: int | None = None) -> int:
        text = self.asked(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise _invalid(name, f"'{text}' is not an integer")
        if int(text) < least or (most is not None and int(text) > most):
            raise _invalid(name, f"must be >= {least}" + ("" if most is None else f" and <= {most}"))
        return int(text)

    def flag(self, name: str) -> bool | None:
        value = self.asked(name)
        if value is not None and value not in ("true", "false"):
            raise _invalid(name, "must be true or false")
        return None if value is None else value == "true"

    def moment(self, name: str) -> datetime | None:
        text = self.asked(name)
        if text is None:
            return None
        try:
            # A plus sign that was not escaped arrives as a space.
            moment = datetime.fromisoformat(text.replace(" ", "+"))
        except ValueError:
            raise _invalid(name, f"'{text}' is not a date-time") from None
        if moment.tzinfo is None:
            raise _invalid(name, f"'{text}' has no offset")
        return moment.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class RunpodAnswer:
    status: int
    body: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    # In place of a JSON body.
    text: str | None = None


def _invalid(name: str, message: str) -> RunpodApiError:
    return RunpodApiError(422, None, [f"query.{name}: {message}"])


def shown_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
