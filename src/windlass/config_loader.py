"""Where settings come from: `windlass.toml`, then the environment, then the command line; the later is stronger.

Every value remembers its source, so that an error can name it and `windlass config show` can print it. A name that is
no setting is refused wherever it stands. An empty environment variable counts as not set. A data directory given on
the command line is a choice of the embedded PostgreSQL, whatever DATABASE_URL says.
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
from windlass.model.redaction import is_named_secret
from windlass.model.urls import HIDDEN, is_database_url, masked, problem_of_database_url
from windlass.model.worker import DEFAULT_FLEET

DEFAULT_FILE = Path("windlass.toml")
PREFIX = "WINDLASS_"
Source = str
Key = tuple[str, ...]
Values = dict[Key, tuple[Any, Source]]


# Minutes in their old name, seconds in ours.
_IN_MINUTES = {"FAILURE_WINDOW_MINUTES"}
_FLEET_VARIABLE = re.compile(r"WINDLASS_FLEETS__(\w+?)__(\w+)")
# Ours, but no settings: a switch of the command line, what a worker tells the commands it runs, what a pod is told, and
# the token of a worker that nobody hired.
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
# Kubernetes puts these into every container beside a Service called windlass or windlass-something.
_FROM_KUBERNETES = re.compile(r"WINDLASS_(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?")


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    source: Source
    description: str
    is_secret: bool

    def shown(self) -> Any:
        """The value as it may be printed."""
        value = self.value.get_secret_value() if isinstance(self.value, SecretStr) else self.value
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            # The environment of a fleet's workers: its names say enough, its values may be anybody's secrets.
            return ", ".join(f"{name}={HIDDEN}" for name in value) or None
        if isinstance(value, tuple):
            return masked(", ".join(map(str, value)))
        if self.is_secret and not is_database_url(str(value)):
            return HIDDEN
        return masked(str(value))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated configuration and where each value came from."""

    config: Config
    sources: Mapping[Key, Source]
    # That was read, if any.
    file: Path | None = None

    def settings(self) -> list[Setting]:
        return [
            Setting(
                ".".join(key),
                _value(self.config, key),
                _source(self.sources, key) or "default",
                field.description or "",
                _is_secret(field),
            )
            for key, field in _fields_of(self.config)
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
    """`file`: must exist if named; otherwise windlass.toml of this folder, if there is one. Raises ConfigError.

    `overrides` are dotted keys; None means not given. Without `has_fleets`, what is set of fleets is left out: for
    whoever runs none, and may see only a part of it. A worker that was hired inherits what the environment says of
    fleets, and not the file that it was to go with.
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
    config = _with_plain_database_url(config, sources)
    folder = file.parent if file and sources.get(("data_dir",)) == str(file) else Path()
    read = file or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
    return Loaded(_with_absolute_data_dir(config, folder), sources, read)


def _with_plain_database_url(config: Config, sources: Mapping[Key, Source]) -> Config:
    if config.database_url is None:
        return config
    # A value read from a file often ends with a line's end.
    url = config.database_url.get_secret_value().strip()
    problem = problem_of_database_url(url)
    if problem is not None:
        raise ConfigError(f"database_url (from {sources[('database_url',)]}) {problem}.")
    return config.model_copy(update={"database_url": SecretStr(url)})


def _with_absolute_data_dir(config: Config, folder: Path) -> Config:
    """What stands in a file is meant from where that file is, anything else from where we are now."""
    if config.data_dir is None:
        return config
    try:
        data_dir = (folder / config.data_dir.expanduser()).absolute()
    except RuntimeError:
        raise ConfigError(f"data_dir is {config.data_dir}, but that home directory is unknown: write it out.") from None
    return config.model_copy(update={"data_dir": data_dir})


# -------------------------------------------------------------------------------------------------------- sources


def _from_file(file: Path | None, named_by: str) -> Values:
    name = file or DEFAULT_FILE
    try:
        with name.open("rb") as stream:
            content = tomllib.load(stream)
    except FileNotFoundError:
        if file is None:
            return {}
        raise ConfigError(f"there is no configuration file {file}: check the path given with {named_by}.") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {name} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML (byte {error.start} is not UTF-8).") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid TOML ({error}).") from None
    return {key: (value, str(name)) for key, value in _flatten(content)}


def _from_environment(environment: Mapping[str, str]) -> Values:
    # The aliases first: a name that says windlass is meant more than one that others read too.
    names = {**ENVIRONMENT_ALIASES, **{variable_of(key): key for key, _ in _fields(Config)}}
    of_fleets = {key for key, _ in _fields(FleetConfig)}
    for name, value in environment.items():
        fleet = _FLEET_VARIABLE.fullmatch(name)
        if fleet and (key := tuple(fleet[2].lower().split("__"))) in of_fleets:
            names[name] = ("fleets", fleet[1].lower(), *key)
        is_ours = name in names or name in NOT_SETTINGS or not name.startswith(PREFIX)
        if value and not is_ours and not _FROM_KUBERNETES.fullmatch(name):
            raise ConfigError(f"{name} in the environment is not a setting: {_did_you_mean(name, list(names))}.")
    return {key: (_converted(name, environment[name]), name) for name, key in names.items() if environment.get(name)}


def environment_of(config: Config, *sections: str) -> dict[str, str]:
    """The settings of these sections, or keys, as environment variables for a program that is to read no file."""
    values = {key: _value(config, key) for key, _ in _fields(Config) if key[0] in sections}
    return {variable_of(key): str(value) for key, value in values.items() if value is not None}


def differing_keys(one: Config, other: Config) -> list[str]:
    """In which settings they differ, those of fleets aside."""
    return [".".join(key) for key, _ in _fields(Config) if _value(one, key) != _value(other, key)]


def variable_of(key: Key) -> str:
    return PREFIX + "__".join(key).upper()


def secret_variables() -> dict[str, Key]:
    """The names under which secrets may stand in the environment."""
    secrets = {key for key, field in _fields(Config) if _is_secret(field)}
    aliases = {name: key for name, key in ENVIRONMENT_ALIASES.items() if key in secrets}
    return aliases | {variable_of(key): key for key in secrets}


def secrets_of(config: Config) -> set[str]:
    """All that no log may hold: secrets, the passwords in them, and what is named so in the environment of workers."""
    found: set[str] = set()
    _collect_secrets(config, found)
    for fleet in config.fleets.values():
        environment = {**fleet.env, **fleet.runpod.env}
        found |= {value for name, value in environment.items() if is_named_secret(name)}
    return found


def _what_is_secret(value: str) -> set[str]:
    """Of a server's address, its password, also as it stands there; of anything else, everything."""
    if value.partition("://")[0] not in ("postgres", "postgresql", "smtp", "smtps"):
        return {value}
    try:
        password = urlsplit(value).password
    except ValueError:
        return {value}
    return {password, unquote(password)} if password else set()


def _collect_secrets(section: BaseModel, found: set[str]) -> None:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, SecretStr):
            found |= _what_is_secret(value.get_secret_value())
        elif isinstance(value, BaseModel):
            _collect_secrets(value, found)
        elif isinstance(value, Mapping):
            for each in value.values():
                if isinstance(each, BaseModel):
                    _collect_secrets(each, found)


def _converted(name: str, value: str) -> Any:
    if name not in _IN_MINUTES:
        return value
    try:
        return float(value) * 60
    except ValueError:
        raise ConfigError(f"{name} in the environment is {value!r}, which is not a number of minutes.") from None


def _did_you_mean(name: str, known: list[str]) -> str:
    close = next((near for near in difflib.get_close_matches(name, known) if _is_near(name, near)), None)
    return (f"did you mean {close}? " if close else "") + "docs/configuration.md lists all of them"


def _is_near(name: str, other: str) -> bool:
    """Also without the sections that both begin with: what every name begins with makes none of them near."""
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
                raise ConfigError(f"{'.'.join(key)} (from {source}): {name} has one value already, and no parts.")
        section[key[-1]] = value
    return nested


# ------------------------------------------------------------------------------------------------------- the model


def _fields(section: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, (*prefix, name))
        elif name != "fleets":
            yield (*prefix, name), field


def _fields_of(config: Config) -> Iterator[tuple[Key, FieldInfo]]:
    """Every setting there is, those of each fleet too."""
    yield from _fields(Config)
    for fleet in config.fleets:
        yield from _fields(FleetConfig, ("fleets", fleet))


def _value(config: BaseModel, key: Key) -> Any:
    value: Any = config
    for name in key:
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def _source(sources: Mapping[Key, Source], key: Key) -> Source | None:
    """Where this value, or the first part of it, came from."""
    return next((source for given, source in sources.items() if given[: len(key)] == key), None)


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in (field.annotation, *get_args(field.annotation))


def _explain(error: ValidationError, sources: Mapping[Key, Source]) -> str:
    """One sentence for each thing that is wrong: the key, the value, its source, and what to do."""
    secrets = {key for key, field in _fields(Config) if _is_secret(field)}
    known = [".".join(key) for key, _ in _fields(Config)] + list(Config.model_fields)
    of_fleets = [".".join(key) for key, _ in _fields(FleetConfig)]
    known += [f"fleets.{k[1]}.{name}" for k in sources if k[0] == "fleets" and k[1:] for name in of_fleets]
    sentences = []
    for problem in error.errors(include_url=False):
        key = tuple(str(part) for part in problem["loc"])
        name = ".".join(key) or "the configuration"
        # Of an item of a list: where the list came from.
        source = (key and (_source(sources, key) or _source(sources, key[:-1]))) or "what was given"
        if problem["type"] == "extra_forbidden":
            sentences.append(f"{name} in {source} is not a setting: {_did_you_mean(name, known)}.")
        else:
            message = _in_our_words(problem)
            is_whole = isinstance(problem["input"], Mapping)
            is_shown = key not in secrets and not is_whole and "env" not in key[2:4]
            given = f" is {masked(repr(problem['input']))}" if is_shown else ""
            origin = _origins(sources, key, message) if is_whole else f"from {source}"
            sentences.append(f"{name} ({origin}){given}: {message[0].lower()}{message[1:]}.")
    return " ".join(sentences)


# What pydantic calls by the names of its own types.
_WORDS = {
    **WORDS_OF_TYPES,
    "string_type": "write text, between quotes",
    "path_type": "write a path, between quotes",
    "tuple_type": 'write a list, as ["a", "b"]',
    "list_type": 'write a list, as ["a", "b"]',
    "too_short": "at least one is needed",
}


def _in_our_words(problem: Any) -> str:
    kind, key = problem["type"], ".".join(map(str, problem["loc"]))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"[{'fleets.NAME' if key == 'fleets' else key}] must be a table"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return _WORDS.get(kind) or message.replace("Input should be", "it must be")


def _origins(sources: Mapping[Key, Source], section: Key, message: str) -> str:
    """Of values at odds with each other: where each that the message names came from."""
    fields = _fields(FleetConfig) if section[:1] == ("fleets",) else _fields(Config)
    named = [name for name in dict.fromkeys(key[-1] for key, _ in fields) if re.search(rf"\b{name}\b", message)]
    return ", ".join(f"{name} from {_source(sources, (*section, name)) or 'default'}" for name in named) or (
        f"from {_source(sources, section) or 'what was given'}"
    )


def _aliases() -> dict[str, Key]:
    """Names people already have in their environment, beside WINDLASS_<KEY> and WINDLASS_<SECTION>__<KEY>."""
    return {
        env: key
        for key, field in (*_fields(Config), *_fields(FleetConfig, ("fleets", DEFAULT_FLEET)))
        if isinstance(field.json_schema_extra, dict)
        for env in str(field.json_schema_extra["env"]).split()
    }


ENVIRONMENT_ALIASES = _aliases()
