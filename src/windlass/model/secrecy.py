"""Texts and settings as they may leave the program: into logs, reasons, answers and pages, without secrets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.model.access import without_tokens
from windlass.model.address import HIDDEN, masked

# Shorter ones would be found in ordinary words.
MIN_SECRET_LENGTH = 6


@dataclass(frozen=True, slots=True)
class Mask:
    """Hides these secrets, passwords in addresses, and our tokens."""

    secrets: tuple[str, ...] = ()

    def __call__(self, text: str) -> str:
        text = without_tokens(masked(text))
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def __repr__(self) -> str:
        return f"Mask({len(self.secrets)} secrets)"


def mask_of(secrets: Iterable[str]) -> Mask:
    # The longest first: one may be a part of another.
    return Mask(tuple(sorted({s for s in secrets if len(s) >= MIN_SECRET_LENGTH}, key=len, reverse=True)))


def shown_settings(settings: Any) -> Any:
    """Settings, as plain values, that anybody may see; of an environment its names, for its values may be secrets."""
    if isinstance(settings, str):
        return Mask()(settings)
    if isinstance(settings, Mapping):
        return {
            name: dict.fromkeys(value, HIDDEN) if name == "env" else shown_settings(value)
            for name, value in settings.items()
        }
    if isinstance(settings, list | tuple):
        return [shown_settings(each) for each in settings]
    return settings
