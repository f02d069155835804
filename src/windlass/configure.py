"""Where settings come from: `windlass.toml`, then the environment, then the command line; the later is stronger.

Every value remembers its source, so that an error can name it and `windlass config show` can print it.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from windlass.model.config import Config
from windlass.model.errors import ConfigError

DEFAULT_FILE = Path("windlass.toml")
# Names people already have in their environment, beside WINDLASS_<KEY> and WINDLASS_<SECTION>__<KEY>.
ENVIRONMENT_ALIASES = {"DATABASE_URL": "database_url"}
Source = str
Key = tuple[str, ...]


class _Environment(BaseSettings, Config):
    """Reads WINDLASS_* with pydantic-settings' rules; only its source is used, validation happens on the whole."""

    model_config = SettingsConfigDict(env_prefix="WINDLASS_", env_nested_delimiter="__", extra="ignore")


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    source: Source
    description: str
    is_secret: bool

    def shown(self) -> Any:
        """The value as it may be printed."""
        if self.value is None:
            return None
        if self.is_secret:
            return "********"
        return str(self.value) if isinstance(self.value, Path) else self.value


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated configuration and where each value came from."""

    config: Config
    sources: Mapping[Key, Source]

    def settings(self) -> list[Setting]:
        return list(_describe(self.config, self.sources))


def load_config(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """`file`: must exist if named; otherwise windlass.toml of this folder, if there is one. Raises ConfigError.

    `overrides` are dotted keys from the command line; None means not given.
    """
    values: dict[Key, tuple[Any, Source]] = {}
    if file is not None or DEFAULT_FILE.is_file():
        values |= _from_file(file or DEFAULT_FILE)
    values |= _from_environment()
    for key, value in (overrides or {}).items():
        if value is not None:
            values[tuple(key.split("."))] = (value, "command line")
    sources = {key: source for key, (_, source) in values.items()}
    try:
        config = Config.model_validate(_nest(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, sources)) from None
    return Loaded(config, sources)


def _from_file(file: Path) -> dict[Key, tuple[Any, Source]]:
    try:
        content = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {file}: check the path given with --config.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read ({error}).") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML ({error}).") from None
    return {key: (value, str(file)) for key, value in _flatten(content)}


def _from_environment() -> dict[Key, tuple[Any, Source]]:
    values: dict[Key, tuple[Any, Source]] = {}
    for name, alias in ENVIRONMENT_ALIASES.items():
        if os.environ.get(name):
            values[tuple(alias.split("."))] = (os.environ[name], name)
    for key, value in _flatten(EnvSettingsSource(_Environment)()):
        values[key] = (value, "WINDLASS_" + "__".join(key).upper())
    return values


def _flatten(content: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _nest(values: Mapping[Key, tuple[Any, Source]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, (value, _) in values.items():
        section = nested
        for name in key[:-1]:
            section = section.setdefault(name, {})
        section[key[-1]] = value
    return nested


def _explain(error: ValidationError, sources: Mapping[Key, Source]) -> str:
    """One sentence for each thing that is wrong: the key, the value, its source, and what to do."""
    sentences = []
    for problem in error.errors(include_url=False):
        key = tuple(str(part) for part in problem["loc"])
        name = ".".join(key) or "the configuration"
        source = sources.get(key) or next((s for k, s in sources.items() if k[: len(key)] == key), "defaults")
        if problem["type"] == "extra_forbidden":
            sentences.append(f"{name} in {source} is not a setting: see docs/configuration.md for the names.")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            given = "" if isinstance(problem["input"], Mapping) else f" is {problem['input']!r}"
            sentences.append(f"{name} (from {source}){given}: {message[0].lower()}{message[1:]}.")
    return " ".join(sentences)


def _describe(section: BaseModel, sources: Mapping[Key, Source], prefix: Key = ()) -> Iterator[Setting]:
    for name, field in type(section).model_fields.items():
        key, value = (*prefix, name), getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _describe(value, sources, key)
        else:
            is_secret = SecretStr in (field.annotation, *get_args(field.annotation))
            yield Setting(".".join(key), value, sources.get(key, "default"), field.description or "", is_secret)
