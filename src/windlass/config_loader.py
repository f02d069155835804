"""Loads the configuration: reads its sources (config_sources.py), adds the command line, validates it.

Every value keeps its source, for error messages and `windlass config show`. A name that is not a setting is an error in
every source. A setting without effect is reported. An empty environment variable counts as not set. A data directory on
the command line selects the embedded PostgreSQL, even if DATABASE_URL is set.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from windlass.config_sources import (
    TABLES_BY_NAME,
    Key,
    Source,
    Values,
    did_you_mean,
    fields,
    is_secret,
    overridden,
    read_sources,
    run_commands,
    variable_of,
)
from windlass.model.config import Config
from windlass.model.errors import WORDS_OF_TYPES, ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.provider_defaults import reason_without_effect
from windlass.model.redaction import HIDDEN, masked, secrets_in, secrets_in_addresses
from windlass.model.urls import is_database_url, problem_of_database_url


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
    """A validated configuration, the source of each value, and sentences about settings that have no effect."""

    config: Config
    sources: Mapping[Key, Source]
    warnings: tuple[str, ...] = ()

    def settings(self) -> list[Setting]:
        return [
            Setting(
                ".".join(key),
                _value(self.config, key),
                _source(self.sources, key) or "default",
                field.description or "",
                is_secret(field),
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

    `overrides` are dotted keys; None means not given. Without `has_fleets`, settings of fleets and adopted tables are
    ignored: a spawned worker inherits the environment of the orchestrator, but not its file, and may see only a part of
    them.
    """
    raw = read_sources(file, file_named_by, os.environ)
    values = raw.values
    given = {tuple(key.split(".")): value for key, value in (overrides or {}).items() if value is not None}
    if ("data_dir",) in given and ("database_url",) not in given:
        values.pop(("database_url",), None)
    warnings = [*raw.warnings, *overridden(values, {key: (value, "the command line") for key, value in given.items()})]
    values |= {key: (value, overrides_from) for key, value in given.items()}
    if not has_fleets:
        values = {key: value for key, value in values.items() if key[0] not in TABLES_BY_NAME}
    run_commands(values)
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
    warnings += _settings_without_effect(config, sources)
    return Loaded(config.model_copy(update=updates), sources, tuple(warnings) if has_fleets else ())


def _settings_without_effect(config: Config, sources: Mapping[Key, Source]) -> Iterator[str]:
    for name, fleet in config.fleets.items():
        for setting in FleetConfig.model_fields:
            source = sources.get(("fleets", name, setting))
            reason = reason_without_effect(
                fleet.provider,
                fleet.policy,
                setting,
                has_gpu=fleet.has_gpu,
                has_volume=fleet.runpod.network_volume_id is not None,
            )
            if source is not None and reason is not None:
                yield f"fleets.{name}.{setting} (from {source}) has no effect {reason}"
    providers = {fleet.provider for fleet in config.fleets.values()}
    for setting, is_used, reason in (
        ("supabase_url", False, "windlass connects with database_url"),
        ("supabase_service_role_key", False, "windlass connects with database_url: remove it from this environment"),
        ("hetzner_network_id", "hetzner" in providers, "no fleet has provider hetzner"),
        ("control_plane_ip", bool(providers - {"local"}), "no fleet has remote workers"),
    ):
        if (source := sources.get((setting,))) is not None and not is_used:
            yield f"{setting} (from {source}) has no effect: {reason}"


def environment_of(config: Config, *sections: str) -> dict[str, str]:
    """The settings of these sections or keys, as environment variables for a child process that reads no file."""
    values = {key: _value(config, key) for key, _ in fields(Config) if key[0] in sections}
    return {variable_of(key): str(value) for key, value in values.items() if value is not None}


def differing_keys(one: Config, other: Config) -> list[str]:
    """The keys whose values differ, except those of fleets."""
    return [".".join(key) for key, _ in fields(Config) if _value(one, key) != _value(other, key)]


def secrets_of(config: Config) -> set[str]:
    """What logs must not contain: secrets, passwords in URLs, and variables of workers that are secrets."""
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
        found |= secrets_in(environment)
        found |= secrets_in_addresses(" ".join((*fleet.bootstrap.requirements, *fleet.bootstrap.setup)))
    return found


def _secret_parts(value: str) -> set[str]:
    """The password of a server's URL, encoded and decoded; the whole of any other value, and each URL in it."""
    if value.partition("://")[0] not in ("postgres", "postgresql", "smtp", "smtps"):
        return {value, *(word for word in value.split() if "://" in word)}
    try:
        password = urlsplit(value).password
    except ValueError:
        return {value}
    return {password, unquote(password)} if password else set()


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


def _all_fields(config: Config) -> Iterator[tuple[Key, FieldInfo]]:
    """All settings, including those of each fleet and adopted table."""
    yield from fields(Config)
    for section, model in TABLES_BY_NAME.items():
        for name in getattr(config, section):
            yield from fields(model, (section, name))


def _value(config: BaseModel, key: Key) -> Any:
    value: Any = config
    for name in key:
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def _source(sources: Mapping[Key, Source], key: Key) -> Source | None:
    """The source of a value, or of its first part."""
    return next((source for given, source in sources.items() if given[: len(key)] == key), None)


def _explain(error: ValidationError, sources: Mapping[Key, Source]) -> str:
    """One sentence per problem: the key, its source, its value, and what to do."""
    secrets = {key for key, field in fields(Config) if is_secret(field)}
    known = [".".join(key) for key, _ in fields(Config)] + list(Config.model_fields)
    for section, model in TABLES_BY_NAME.items():
        names = [".".join(key) for key, _ in fields(model)]
        known += [f"{section}.{k[1]}.{name}" for k in sources if k[0] == section and k[1:] for name in names]
    sentences = []
    for problem in error.errors(include_url=False):
        key = tuple(str(part) for part in problem["loc"])
        name = ".".join(key) or "the configuration"
        # An item of a list has the source of the list.
        source = (key and (_source(sources, key) or _source(sources, key[:-1]))) or "an unknown source"
        if problem["type"] == "extra_forbidden":
            sentences.append(f"{name} in {source} is not a setting: {did_you_mean(name, known)}.")
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
        return f"[{f'{key}.NAME' if key in TABLES_BY_NAME else key}] must be a table"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return _MESSAGES.get(kind) or message.replace("Input should be", "it must be")


def _origins(sources: Mapping[Key, Source], section: Key, message: str) -> str:
    """For an error about several values: the source of each that the message names."""
    keys = [key for key, _ in fields(TABLES_BY_NAME.get(section[0] if section else "", Config))]
    named = [name for name in dict.fromkeys(key[-1] for key in keys) if re.search(rf"\b{name}\b", message)]
    return ", ".join(f"{name} from {_source(sources, (*section, name)) or 'default'}" for name in named) or (
        f"from {_source(sources, section) or 'an unknown source'}"
    )
