"""Texts and settings as they may leave the program: into logs, reasons, answers and pages, without secrets."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.model.auth import without_tokens
from windlass.model.urls import HIDDEN, masked

# Shorter ones would be found in ordinary words.
MIN_SECRET_LENGTH = 6
# In the name of a variable: what it holds is taken for a secret.
_TELLING_WORDS = "KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL"
_SECRET_NAME = re.compile(_TELLING_WORDS, re.IGNORECASE)
# A part of a value in quotes, also as those stand in JSON. (A quote before one of these signs ends what is around it.)
_QUOTED = r"""(?:"(?![,:}\]\s])(?:\\.|[^"\\])*"|'(?![,:}\]\s])[^']*'|\\"(?:[^"\\]|\\[^"])*\\")"""
# As a shell writes it down (`set -x`, `export -p`): its value ends with the word, quoted parts included; with a quote
# that is never closed, at the end of the line. Programs write in small letters whatever they like (unique_key=7), so
# only names of environments are meant. (The lookahead is tried once a word: text of any length takes a time that grows
# with its length, not with the square of it.)
_ASSIGNMENT = re.compile(
    rf"""\b(?=[A-Z0-9_]*(?:{_TELLING_WORDS}))([A-Z0-9_]+)=(?:\$?(?:{_QUOTED}|\\.|[^\s"'\\])+|["'](?![,:}}\]\s])[^\n]+)"""
)


@dataclass(frozen=True, slots=True)
class Mask:
    """Hides these secrets, passwords in addresses, our tokens, and the values of variables that are named like
    secrets, where a shell shows them."""

    secrets: tuple[str, ...] = ()

    def __call__(self, text: str) -> str:
        text = without_tokens(masked(text))
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return _ASSIGNMENT.sub(rf"\1={HIDDEN}", text)

    def __repr__(self) -> str:
        return f"Mask({len(self.secrets)} secrets)"


def is_named_secret(variable: str) -> bool:
    """Whether a variable of an environment is to be taken for a secret."""
    return _SECRET_NAME.search(variable) is not None


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
