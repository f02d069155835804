"""Loads the configuration from `windlass.toml`, the environment and the command line. Later sources override earlier.

Every value keeps its source, for error messages and `windlass config show`. A name that is not a setting is an error in
every source. An empty environment variable counts as not set. A data directory on the command line selects the
embedded PostgreSQL, even if DATABASE_URL is set.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from windlass.model.config import Config
from windlass.model.errors import WORDS_OF_TYPES, ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.redaction import HIDDEN, is_named_secret, masked
from windlass.model.urls import is_database_url, problem_of_database_url
from windlass.model.worker import DEFAULT_FLEET

DEFAULT_FILE = Path("windlass.toml")
PREFIX = "WINDLASS_"
Source = str
Key = tuple[str, ...]
Values = dict[Key, tuple[Any, Source]]


# Variables in minutes, for settings in seconds.
_IN_MINUTES = {"FAILURE_WINDOW_MINUTES"}
_FLEET_VARIABLE = re.compile(r"WINDLASS_FLEETS__(\w+?)__(\w+)")
# Variables of windlass that are not settings: for the command line, for handler commands, for pods, and for workers
# that register themselves.
NOT_SETTINGS = {
    "WINDLASS_DEBUG",
    "WINDLASS_TASK_ID",
    "WINDLASS_QUEUE",
    "WINDLASS_ATTEMPT",
    "WINDLASS_CLAIM_TOKEN",
    "WINDLASS_POD",
    "WINDLASS_JOIN",
    "WINDLASS_TOKEN",
}
# Kubernetes sets these in every container if there is a Service named windlass or windlass-something.
_FROM_KUBERNETES = re.compile(r"WINDLASS_(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?")


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    source: Source
    description: str
    is_secret: bool

    def shown(self) -> Any:
        """The value without secrets."""
        value = self.value.get_secret_value() if isinstance(self.value, SecretStr) else self.value
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            # The environment of workers. Its values may be secrets.
            return ", ".join(f"{name}={HIDDEN}" for name in value) or None
        if isinstance(value, tuple):
            return masked(", ".join(map(str, value)))
        if self.is_secret and not is_database_url(str(value)):
            return HIDDEN
        return masked(str(value))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated configuration, and the source of each value."""

    config: Config
    sources: Mapping[Key, Source]

    def settings(self) -> list[Setting]:
        return [
            Setting(
                ".".join(key),
                _value(self.config, key),
                _source(self.sources, key) or "default",
                field.description or "",
                _is_secret(field),
            )
            for key, field in _all_fields(self.config)
        ]

    def source(self, key: str) -> Source:
        return _source(self.sources, tuple(key.split("."))) or "default"


def load_config(
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    overrides_from: Source = "command line",
    *,
    file_named_by: str = "--config",
    has_fleets: bool = True,
) -> Loaded:
    """Raises ConfigError. `file` must exist if given; the default is windlass.toml in the current folder, if present.

    `overrides` are dotted keys; None means not given. Without `has_fleets`, fleet settings are ignored: a spawned
    worker inherits the environment of the orchestrator, but not its file, and may see only a part of them.
    """
    values: Values = _from_file(file, file_named_by)
    values |= _from_environment(os.environ)
    given = {tuple(key.split(".")): value for key, value in (overrides or {}).items() if value is not None}
    if ("data_dir",) in given and ("database_url",) not in given:
        values.pop(("database_url",), None)
    values |= {key: (value, overrides_from) for key, value in given.items()}
    if not has_fleets:
        values = {key: value for key, value in values.items() if key[0] != "fleets"}
    sources = {key: source for key, (_, source) in values.items()}
    try:
        config = Config.model_validate(_nest(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, sources)) from None
    updates: dict[str, Any] = {}
    if config.database_url is not None:
        # A value that was read from a file often ends with a line break.
        url = config.database_url.get_secret_value().strip()
        problem = problem_of_database_url(url)
        if problem is not None:
            raise ConfigError(f"database_url (from {sources[('database_url',)]}) {problem}.")
        updates["database_url"] = SecretStr(url)
    if config.data_dir is not None:
        # A path in a file is relative to the file, other paths to the current folder.
        folder = file.parent if file and sources.get(("data_dir",)) == str(file) else Path()
        try:
            updates["data_dir"] = (folder / config.data_dir.expanduser()).absolute()
        except RuntimeError:
            raise ConfigError(
                f"data_dir is {config.data_dir}, but that home directory is unknown: write the full path."
            ) from None
    return Loaded(config.model_copy(update=updates), sources)


# -------------------------------------------------------------------------------------------------------- sources


def _from_file(file: Path | None, named_by: str) -> Values:
    name = file or DEFAULT_FILE
    try:
        with name.open("rb") as stream:
            content = tomllib.load(stream)
    except FileNotFoundError:
        if file is None:
            return {}
        raise ConfigError(f"configuration file {file} not found. Check {named_by}.") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {name}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML (byte {error.start} is not UTF-8).") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid TOML ({error}).") from None
    return {key: (value, str(name)) for key, value in _flatten(content)}


def _from_environment(environment: Mapping[str, str]) -> Values:
    # Names with the prefix override aliases, which other programs read too.
    names = {**ENVIRONMENT_ALIASES, **{variable_of(key): key for key, _ in _fields(Config)}}
    fleet_keys = {key for key, _ in _fields(FleetConfig)}
    for name, value in environment.items():
        fleet = _FLEET_VARIABLE.fullmatch(name)
        if fleet and (key := tuple(fleet[2].lower().split("__"))) in fleet_keys:
            names[name] = ("fleets", fleet[1].lower(), *key)
        is_known = name in names or name in NOT_SETTINGS or not name.startswith(PREFIX)
        if value and not is_known and not _FROM_KUBERNETES.fullmatch(name):
            raise ConfigError(f"{name} in the environment is not a setting: {_did_you_mean(name, list(names))}.")
    return {key: (_convert(name, environment[name]), name) for name, key in names.items() if environment.get(name)}


def environment_of(config: Config, *sections: str) -> dict[str, str]:
    """The settings of these sections or keys, as environment variables for a child process that reads no file."""
    values = {key: _value(config, key) for key, _ in _fields(Config) if key[0] in sections}
    return {variable_of(key): str(value) for key, value in values.items() if value is not None}


def differing_keys(one: Config, other: Config) -> list[str]:
    """The keys whose values differ, except those of fleets."""
    return [".".join(key) for key, _ in _fields(Config) if _value(one, key) != _value(other, key)]


def variable_of(key: Key) -> str:
    return PREFIX + "__".join(key).upper()


def secret_variables() -> dict[str, Key]:
    """Environment variables that hold secrets, with their keys."""
    secrets = {key for key, field in _fields(Config) if _is_secret(field)}
    aliases = {name: key for name, key in ENVIRONMENT_ALIASES.items() if key in secrets}
    return aliases | {variable_of(key): key for key in secrets}


def secrets_of(config: Config) -> set[str]:
    """What logs must not contain: secrets, passwords in URLs, and variables of workers named like secrets."""
    found: set[str] = set()
    sections: list[BaseModel] = [config]
    while sections:
        section = sections.pop()
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, SecretStr):
                found |= _secret_parts(value.get_secret_value())
            each = value.values() if isinstance(value, Mapping) else [value]
            sections += [part for part in each if isinstance(part, BaseModel)]
    for fleet in config.fleets.values():
        environment = {**fleet.env, **fleet.runpod.env}
        found |= {value for name, value in environment.items() if is_named_secret(name)}
    return found


def _secret_parts(value: str) -> set[str]:
    """The password of a server's URL, encoded and decoded; the whole of any other value."""
    if value.partition("://")[0] not in ("postgres", "postgresql", "smtp", "smtps"):
        return {value}
    try:
        password = urlsplit(value).password
    except ValueError:
        return {value}
    return {password, unquote(password)} if password else set()


def _convert(name: str, value: str) -> Any:
    if name not in _IN_MINUTES:
        return value
    try:
        return float(value) * 60
    except ValueError:
        raise ConfigError(f"{name} in the environment is {value!r}, which is not a number of minutes.") from None


def _did_you_mean(name: str, known: list[str]) -> str:
    close = next((near for near in difflib.get_close_matches(name, known) if _is_near(name, near)), None)
    return (f"did you mean {close}? " if close else "") + "docs/configuration.md lists all settings"


def _is_near(name: str, other: str) -> bool:
    """Whether two names are similar without their common sections, which make all of their names similar."""
    ours, theirs = (re.split(r"\.|__", each.removeprefix(PREFIX)) for each in (name, other))
    while ours and theirs and ours[0] == theirs[0]:
        del ours[0], theirs[0]
    return bool(difflib.get_close_matches(".".join(ours), [".".join(theirs)]))


def _flatten(content: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _nest(values: Values) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, (value, source) in values.items():
        section = nested
        for name in key[:-1]:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{'.'.join(key)} (from {source}): {name} is a value, not a section.")
        section[key[-1]] = value
    return nested


# ------------------------------------------------------------------------------------------------------- the model


def _fields(section: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, (*prefix, name))
        elif name != "fleets":
            yield (*prefix, name), field


def _all_fields(config: Config) -> Iterator[tuple[Key, FieldInfo]]:
    """All settings, including those of each fleet."""
    yield from _fields(Config)
    for fleet in config.fleets:
        yield from _fields(FleetConfig, ("fleets", fleet))


def _value(config: BaseModel, key: Key) -> Any:
    value: Any = config
    for name in key:
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def _source(sources: Mapping[Key, Source], key: Key) -> Source | None:
    """The source of a value, or of its first part."""
    return next((source for given, source in sources.items() if given[: len(key)] == key), None)


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in (field.annotation, *get_args(field.annotation))


def _explain(error: ValidationError, sources: Mapping[Key, Source]) -> str:
    """One sentence per problem: the key, its source, its value, and what to do."""
    secrets = {key for key, field in _fields(Config) if _is_secret(field)}
    known = [".".join(key) for key, _ in _fields(Config)] + list(Config.model_fields)
    fleet_names = [".".join(key) for key, _ in _fields(FleetConfig)]
    known += [f"fleets.{k[1]}.{name}" for k in sources if k[0] == "fleets" and k[1:] for name in fleet_names]
    sentences = []
    for problem in error.errors(include_url=False):
        key = tuple(str(part) for part in problem["loc"])
        name = ".".join(key) or "the configuration"
        # An item of a list has the source of the list.
        source = (key and (_source(sources, key) or _source(sources, key[:-1]))) or "an unknown source"
        if problem["type"] == "extra_forbidden":
            sentences.append(f"{name} in {source} is not a setting: {_did_you_mean(name, known)}.")
        else:
            message = _message(problem)
            is_section = isinstance(problem["input"], Mapping)
            is_shown = key not in secrets and not is_section and "env" not in key[2:4]
            given = f" is {masked(repr(problem['input']))}" if is_shown else ""
            origin = _origins(sources, key, message) if is_section else f"from {source}"
            sentences.append(f"{name} ({origin}){given}: {message[0].lower()}{message[1:]}.")
    return " ".join(sentences)


# Messages for errors that pydantic describes with names of Python types.
_MESSAGES = {
    **WORDS_OF_TYPES,
    "string_type": "write text in quotes",
    "path_type": "write a path in quotes",
    "tuple_type": 'write a list, for example ["a", "b"]',
    "list_type": 'write a list, for example ["a", "b"]',
    "too_short": "at least one item is required",
}


def _message(problem: Any) -> str:
    kind, key = problem["type"], ".".join(map(str, problem["loc"]))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"[{'fleets.NAME' if key == 'fleets' else key}] must be a table"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return _MESSAGES.get(kind) or message.replace("Input should be", "it must be")


def _origins(sources: Mapping[Key, Source], section: Key, message: str) -> str:
    """For an error about several values: the source of each that the message names."""
    fields = _fields(FleetConfig) if section[:1] == ("fleets",) else _fields(Config)
    named = [name for name in dict.fromkeys(key[-1] for key, _ in fields) if re.search(rf"\b{name}\b", message)]
    return ", ".join(f"{name} from {_source(sources, (*section, name)) or 'default'}" for name in named) or (
        f"from {_source(sources, section) or 'an unknown source'}"
    )


def _aliases() -> dict[str, Key]:
    """Other names for settings than WINDLASS_<KEY> and WINDLASS_<SECTION>__<KEY>, such as DATABASE_URL."""
    return {
        env: key
        for key, field in (*_fields(Config), *_fields(FleetConfig, ("fleets", DEFAULT_FLEET)))
        if isinstance(field.json_schema_extra, dict)
        for env in str(field.json_schema_extra["env"]).split()
    }


ENVIRONMENT_ALIASES = _aliases()
