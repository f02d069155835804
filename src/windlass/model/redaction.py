"""Removes secrets from text and settings before they reach logs, reasons, HTTP responses and pages.

`masked` hides passwords and tokens in URLs. `Mask` also hides known secrets, plain and encoded (URL, JSON, HTML,
hexadecimal, base64), our tokens, authorization headers, and values with names like API_KEY. Both take time proportional
to the length of the text, whatever it contains. Keys, hexadecimal digits and base64 are also hidden with white space
between their characters, and each longer line of a secret with several lines is hidden without the others.

A process has one list of the secrets it knows (`set_known_secrets`). `without_known_secrets` hides their values alone,
and leaves everything else as it is. It is for one text: masked_values.py applies it to the values of JSON and pages,
whose numbers, keys and markup it could damage.

A secret that is an ordinary word or number, such as `windlass`, `service-role` or `100000`, is hidden where it stands
alone, and not as a part of a longer word, file name or number, such as `worker_id`, `windlass.css` and `1.100000`.
These are the secrets of fewer than MIN_PART_LENGTH characters that are digits only, or letters with `-` or `_` between
them. In hexadecimal digits and base64 they are hidden like others.
"""

import base64
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from windlass.model.auth import without_tokens

HIDDEN = "********"
# A shorter secret could be a part of ordinary words.
MIN_SECRET_LENGTH = 6
# A pattern of a secret in mixed encodings costs about 0.1 ms per character to compile. Keys of services and addresses
# with a password are shorter. A longer secret, such as a certificate, is hidden in each single encoding.
MAX_ESCAPED_LENGTH = 500
# Shorter lines of a secret, and shorter texts with white space in them, could be words of other texts.
MIN_PART_LENGTH = 16
# Programs wrap base64 after this many characters: MIME and coreutils, PEM and openssl.
BASE64_LINES = (76, 64)
_LINE_END = re.compile(r"[\r\n]|\\+[rn]")
# No quotes: a value that is hidden in JSON must not end a string.
_LINE_END_OR_QUOTE = re.compile(r"""[\r\n"']|\\+[rn"']""")
# The first and the last line of a PEM file are no secrets.
_PEM_LABEL = re.compile(r"-----(?:BEGIN|END) [^-]*-----")
# Texts that programs break into lines at any place. No quotes, as above.
_WRAPPABLE = re.compile(rf"[A-Za-z0-9+/=_.~-]{{{MIN_PART_LENGTH},}}")
# Line ends and tabs as JSON and Python print them, also in a string of a string.
_ESCAPED_SPACES = (r"\\n", r"\\r", r"\\t", r"\n", r"\r", r"\t")
# A shorter secret of this form is a part of other words, numbers and names too.
_ORDINARY = re.compile(r"[0-9]+|[A-Za-z]+(?:[_-][A-Za-z]+)*")
# The end of an escape sequence, as in `\n` and `%3A`, is no part of the word after it.
_ESCAPES_BEFORE_WORD = (
    *(r"\\[nrtbf]", r"\\x[0-9a-fA-F]{2}", r"\\u[0-9a-fA-F]{4}"),
    *("%[0-9a-fA-F]{2}", "%25[0-9a-fA-F]{2}", "%2525[0-9a-fA-F]{2}"),
)
# Shorter values are more likely versions, dates and names.
_KEY = re.compile(r"[A-Za-z0-9_+=-]{20,}")
_HEX_KEY = re.compile(r"[0-9a-f]{32,}|[0-9A-F]{32,}")
# Characters that no encoding of a text changes, and the parts of a secret that consist of them.
_UNCHANGED = re.compile(r"[A-Za-z0-9]*")
_ALPHANUMERIC = re.compile(r"[A-Za-z0-9]+")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
# A backslash, also percent-encoded: JSON may be part of an address.
_BACKSLASH = r"(?:\\|(?i:%(?:25){0,3}5c))"
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_URL_USER = re.compile(r"(?<![\w+.-])[\w+.-]+://[^:/?#@]*:")
_PASSWORD_IN_QUERY = re.compile(r"([?&]\w*password)=[^&\s]*", re.IGNORECASE)
# A variable with one of these words in its name holds a secret.
_SECRET_WORDS = "KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH(?!OR)|DSN"  # noqa: S105
_SECRET_NAME = re.compile(_SECRET_WORDS, re.IGNORECASE)
# A quoted part of a value, also with quotes escaped as in JSON. A quote before one of the signs , : } ] or white space
# ends a string around the value.
_QUOTED = r"""(?:"(?![,:}\]\s])(?:\\.|[^"\\])*"|'(?![,:}\]\s])[^']*'|\\"(?:[^"\\]|\\[^"])*\\")"""
# NAME=value as a shell prints it (`set -x`, `export -p`). The value ends with the word, including quoted parts, or at
# the end of the line if a quote is not closed. Only upper-case names match: programs print unique_key=7 and the like.
# The lookahead is tried once per word, so that the time is not quadratic.
_ASSIGNMENT = re.compile(
    rf"""\b(?=[A-Z0-9_]*(?:{_SECRET_WORDS}))([A-Z0-9_]+)=(?:\$?(?:{_QUOTED}|\\.|[^\s"'\\])+|["'](?![,:}}\]\s])[^\n]+)"""
)
# "api_key": "value", as JSON and Python print it. Only names that say that the value is a secret.
_MEMBER = re.compile(
    r"""(["'])((?:[\w-]{0,40}[_-])?(?:api[_-]?key|access[_-]?key|private[_-]?key|secret|token|password|passwd|authorization))"""
    r"""\1(\s*:\s*)(["'])(?:\\.|(?!\4)[^\\])*\4""",
    re.IGNORECASE,
)
# password=value of a libpq connection string.
_PARAMETER = re.compile(r"\b(password|passwd|sslpassword)(\s*=\s*)(?:'(?:\\.|[^'\\])*'|[^\s'&,;]+)", re.IGNORECASE)
_AUTHORIZATION = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
# Tokens of forges and package indexes take the place of the user.
_WEB_USER = re.compile(r"(?<![\w+.-])((?:[\w.-]{1,20}\+)?https?://)[^\s/?#@:]+@", re.IGNORECASE)

_WEB_USER_AND_PASSWORD = re.compile(r"https?://([^\s/?#@]+)@", re.IGNORECASE)


def masked(text: str) -> str:
    """Hide the passwords of the URLs in a text, and the users of web addresses, which are tokens."""
    text = _WEB_USER.sub(rf"\1{HIDDEN}@", text) if "://" in text else text
    return _PASSWORD_IN_QUERY.sub(rf"\1={HIDDEN}", _replace_passwords(text, f":{HIDDEN}"))


def secrets_in_addresses(text: str) -> set[str]:
    """Passwords of the web addresses in a text, and users without a password, which are tokens; encoded and decoded."""
    found = {user.partition(":")[2] or user for user in _WEB_USER_AND_PASSWORD.findall(text)}
    return found | {unquote(secret) for secret in found}


def without_password(url: str) -> str:
    """Remove the password from a URL, for a program that asks for it or reads PGPASSWORD or ~/.pgpass."""
    url = _PASSWORD_IN_QUERY.sub("", _replace_passwords(url, ""))
    # If the password was the first parameter of the query, the next one is now the first.
    return re.sub(r"^([^?&]*)&", r"\1?", url)


def _replace_passwords(text: str, replacement: str) -> str:
    """In each word, replace everything between the user and the last @.

    A password that should have been encoded may itself contain : / or @. A single pattern would be slow on long texts.
    """

    def replace(word: re.Match[str]) -> str:
        user, end = _URL_USER.search(word[0]), word[0].rfind("@")
        if user is None or end < user.end():
            return word[0]
        return word[0][: user.end() - 1] + replacement + word[0][end:]

    return re.sub(r"\S+", replace, text) if "://" in text else text


@dataclass(frozen=True, slots=True)
class EscapedSecret:
    """A secret with characters that encodings change, or an ordinary word.

    `part` is in all its encoded forms, so most texts are skipped."""

    secret: str
    part: str
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Mask:
    # Secrets, their encoded forms and their lines, the longest first.
    values: tuple[str, ...] = ()
    escaped: tuple[EscapedSecret, ...] = ()
    # Forms that programs wrap, without white space.
    wrapped: tuple[str, ...] = ()
    # Secrets that are ordinary words or numbers.
    words: tuple[EscapedSecret, ...] = ()

    def hide(self, text: str) -> str:
        """Hide the secrets, and nothing else. The text keeps its number of lines."""
        # The whole before its lines, of which the last may be short.
        text = self._hide_wrapped(text)
        for each in self.escaped:
            if each.part in text:
                text = each.pattern.sub(lambda found: _hidden(found[0]), text)
        for value in self.values:
            if value in text:
                text = text.replace(value, _hidden(value))
        # Last: a longer secret may contain the word.
        for each in self.words:
            if each.part in text:
                text = each.pattern.sub(HIDDEN, text)
        return text

    def occurs_in(self, text: str) -> bool:
        """Whether `hide` would change this text, or a string of it if the text is JSON. Quicker than `hide`."""
        return (
            any(value in text for value in self.values)
            or any(e.part in text and e.pattern.search(text) is not None for e in (*self.escaped, *self.words))
            or bool(self._wrapped_in(_spaced(text)))
        )

    def _wrapped_in(self, spaced: str) -> list[str]:
        if not self.wrapped:
            return []
        solid = "".join(spaced.split())
        return [value for value in self.wrapped if value in solid]

    def _hide_wrapped(self, text: str) -> str:
        """Hide secrets with white space between their characters."""
        spaced = _spaced(text)
        found = self._wrapped_in(spaced)
        if not found:
            return text
        solid = "".join(spaced.split())
        places = [place for place, character in enumerate(spaced) if not character.isspace()]
        spans = sorted(
            (places[match.start()], places[match.end() - 1] + 1)
            for value in found
            for match in re.finditer(re.escape(value), solid)
        )
        parts, end = [], 0
        for start, stop in spans:
            if start >= end:
                parts += [text[end:start], _hidden(text[start:stop])]
            elif stop > end:
                parts.append(_hidden(text[end:stop]))
            end = max(end, stop)
        return "".join([*parts, text[end:]])

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(
            _longest_first({*self.values, *other.values}),
            _longest_secret_first(*self.escaped, *other.escaped),
            _longest_first({*self.wrapped, *other.wrapped}),
            _longest_secret_first(*self.words, *other.words),
        )

    def __call__(self, text: str) -> str:
        return _without_patterns(self.hide(text))

    def mask_lines(self, lines: Sequence[str]) -> list[str]:
        """Mask lines that follow each other, also secrets that continue on the next line."""
        return list(map(_without_patterns, self.hide("\n".join(lines)).split("\n")))

    def __repr__(self) -> str:
        return f"Mask({len(self.values)} values)"


def _spaced(text: str) -> str:
    """The text with spaces in place of escaped line ends and tabs, each as long as before."""
    if "\\" in text:
        for escape in _ESCAPED_SPACES:
            text = text.replace(escape, " " * len(escape))
    return text


def _hidden(text: str) -> str:
    return "\n".join([HIDDEN] * (1 + text.count("\n")))


def _without_patterns(text: str) -> str:
    """Hide what looks like a secret because of its form or its surroundings."""
    text = without_tokens(masked(text))
    text = _AUTHORIZATION.sub(rf"\1 {HIDDEN}", text)
    text = _PARAMETER.sub(rf"\1\2{HIDDEN}", text)
    text = _MEMBER.sub(rf"\1\2\1\3\4{HIDDEN}\4", text)
    return _ASSIGNMENT.sub(rf"\1={HIDDEN}", text)


def mask_of(secrets: Iterable[str]) -> Mask:
    known = _long_enough(secrets)
    ordinary = {each for each in known if len(each) < MIN_PART_LENGTH and _ORDINARY.fullmatch(each)}
    escaped = [each for each in known if len(each) <= MAX_ESCAPED_LENGTH and not _UNCHANGED.fullmatch(each)]
    encoded = {form for each in ordinary for form in _forms(each)} - ordinary
    return quick_mask_of(known - ordinary) | Mask(
        tuple(encoded), tuple(map(_escaped_secret, set(escaped) - ordinary)), (), tuple(map(_word, ordinary))
    )


def quick_mask_of(texts: Iterable[str]) -> Mask:
    """A mask that costs little to make, for texts that are hidden once. It knows encodings, but no mixture of two."""
    known = _long_enough(texts)
    forms = {form for text in known for form in _forms(text)}
    solid = {"".join(form.split()) for form in forms}
    return Mask(
        _longest_first(forms.union(*map(_lines, known))),
        wrapped=_longest_first(form for form in solid if _WRAPPABLE.fullmatch(form)),
    )


def _long_enough(texts: Iterable[str]) -> set[str]:
    """The texts without white space around them, with the line ends of Unix and of Windows."""
    known = {text.strip() if len(text.strip()) >= MIN_SECRET_LENGTH else text for text in texts}
    unix = {text.replace("\r\n", "\n") for text in known if len(text) >= MIN_SECRET_LENGTH}
    return unix | {text.replace("\n", "\r\n") for text in unix}


def _lines(secret: str) -> Iterator[str]:
    """The parts of a secret that programs print as lines of their own, with and without encoding it."""
    if _LINE_END.search(secret):
        lines = map(str.strip, _LINE_END_OR_QUOTE.split(secret))
        yield from (line for line in lines if len(line) >= MIN_PART_LENGTH and not _PEM_LABEL.fullmatch(line))
    encoded = base64.b64encode(secret.encode(errors="surrogatepass")).decode().rstrip("=")
    for width in BASE64_LINES:
        starts = range(0, len(encoded), width)
        yield from (encoded[start : start + width] for start in starts if len(encoded) - start >= MIN_PART_LENGTH)


def _longest_first(texts: Iterable[str]) -> tuple[str, ...]:
    """One may be a part of another."""
    return tuple(sorted(texts, key=len, reverse=True))


def _longest_secret_first(*secrets: EscapedSecret) -> tuple[EscapedSecret, ...]:
    by_text = {each.secret: each for each in secrets}
    return tuple(by_text[text] for text in _longest_first(by_text))


def _escaped_secret(secret: str) -> EscapedSecret:
    part = max(_ALPHANUMERIC.findall(secret), key=len, default="")
    return EscapedSecret(secret, part, re.compile("".join(map(_encoded_character, secret))))


def _word(secret: str) -> EscapedSecret:
    """An ordinary word, whose characters no encoding changes, where it stands alone."""
    escapes = "".join(f"|(?<={escape}{secret})" for escape in _ESCAPES_BEFORE_WORD)
    # The word comes first, because the search for a constant is quick; then come conditions on the text before it.
    start = rf"(?:(?<![\w-]{secret}){escapes})(?<!(?<!\\)\w\.{secret})"
    return EscapedSecret(secret, secret, re.compile(rf"{secret}{start}(?![\w-])(?!\.\w)"))


def _encoded_character(character: str) -> str:
    """A pattern of a character in an address, JSON, HTML or a shell's quotes, also if it was encoded repeatedly."""
    if _UNCHANGED.fullmatch(character):
        return character
    content, units = character.encode(errors="surrogatepass"), character.encode("utf-16-be", errors="surrogatepass")
    forms = [
        re.escape(character),
        "".join(f"(?i:%(?:25){{0,3}}{byte:02x})" for byte in content),
        rf"&(?:amp;){{0,3}}#(?:(?i:x0{{0,6}}{ord(character):x})|0{{0,6}}{ord(character)});",
        *(rf"&(?:amp;){{0,3}}{name};" for name, escaped in _ENTITIES.items() if escaped == character),
        *([r"\+"] if character == " " else []),
    ]
    escapes = [
        f"{_BACKSLASH}{{0,7}}".join(
            rf"{_BACKSLASH}(?i:u{units[place : place + 2].hex()})" for place in range(0, len(units), 2)
        ),
        *(rf"{_BACKSLASH}{letter}" for letter, escaped in _ESCAPES.items() if escaped == character),
    ]
    # Strings in strings have several backslashes before a character.
    return rf"{_BACKSLASH}{{0,7}}(?:{'|'.join([*forms, *escapes])})"


def _forms(secret: str) -> Iterator[str]:
    """The secret as it is, and as programs encode it. Base64 has three forms, depending on what stands before it."""
    content = secret.encode(errors="surrogatepass")
    yield secret
    if not _UNCHANGED.fullmatch(secret):
        for safe in ("", "/"):
            yield quote(secret, safe=safe, errors="surrogatepass")
        yield quote_plus(secret, errors="surrogatepass")
        yield json.dumps(secret)[1:-1]
        yield json.dumps(secret, ensure_ascii=False)[1:-1]
        yield json.dumps(secret)[1:-1].replace("/", "\\/")
        yield html.escape(secret)
        # Most of Python's errors quote a text in this form.
        yield repr(secret)[1:-1]
        yield ascii(secret)[1:-1]
    yield content.hex()
    yield content.hex().upper()
    for before in range(3):
        # Leave out the characters that also encode neighbouring bytes.
        start, end = (0, 2, 3)[before], len(content) + before
        encoded = base64.b64encode(b"\0" * before + content).decode()[start : end // 3 * 4]
        if len(encoded) >= MIN_SECRET_LENGTH:
            yield encoded
            yield encoded.replace("+", "-").replace("/", "_")


_known = Mask()


def set_known_secrets(secrets: Iterable[str]) -> None:
    """Replace the list of the secrets that this process knows."""
    global _known  # noqa: PLW0603 - one list for the whole process
    _known = mask_of(secrets)


def add_known_secrets(secrets: Iterable[str]) -> None:
    global _known  # noqa: PLW0603
    _known = _known | mask_of(secrets)


def mask_known(text: str) -> str:
    """Mask all known secrets."""
    return _known(text)


def mask_known_lines(lines: Sequence[str]) -> list[str]:
    """Mask all known secrets in lines that follow each other."""
    return _known.mask_lines(lines)


def without_known_secrets(text: str) -> str:
    """Hide the values of known secrets, plain and encoded, and nothing else."""
    return _known.hide(text)


def has_known_secret(text: str) -> bool:
    """Whether a known secret occurs in a text, or in a string of it if the text is JSON."""
    return _known.occurs_in(text)


def secrets_in(environment: Mapping[str, str]) -> set[str]:
    """Values of variables that are named like secrets, or that look like keys."""
    return {value for name, value in environment.items() if is_named_secret(name) or _looks_like_key(value)}


def _looks_like_key(value: str) -> bool:
    """A private key, long hexadecimal digits, or many letters of both cases with digits: no path, address or word."""
    if "PRIVATE KEY-----" in value or _HEX_KEY.fullmatch(value):
        return True
    kinds = (str.isdigit, str.islower, str.isupper)
    return _KEY.fullmatch(value) is not None and all(any(map(is_kind, value)) for is_kind in kinds)


def is_named_secret(variable: str) -> bool:
    """Whether the name of an environment variable says that its value is a secret."""
    return _SECRET_NAME.search(variable) is not None


def shown_settings(settings: Any) -> Any:
    """Settings as plain values, without secrets. The values of `env` tables are hidden, because they may be secrets."""
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
