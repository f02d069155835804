"""Reads settings from `.env`, `windlass.toml`, secret mounts and the environment. Later sources override earlier.

Every secret setting can also come from a file named by `<VARIABLE>_FILE`, from a file called like its variable in
$CREDENTIALS_DIRECTORY (systemd) or /run/secrets (Docker), or from a command: a value `cmd:PROGRAM ARGUMENTS` is
replaced by what the program prints. Variables of `.env` are read as settings only; workers do not inherit them.

The variables of the original orchestrators (MIN_ACTIVE_GPUS and others) set values of the fleet `default`, or of the
only fleet that other sources name. Where several fleets are named, they have no effect, which is reported.
"""

import difflib
import io
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from dotenv import dotenv_values
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from windlass.model.adoption import AdoptionConfig
from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.provider_defaults import IGNORED_BY_ADAPTIVE, POLICY_SETTINGS
from windlass.model.worker import DEFAULT_FLEET

DEFAULT_FILE = Path("windlass.toml")
DOTENV_FILE = Path(".env")
# End of the source of a variable in that file.
IN_DOTENV = f" in {DOTENV_FILE}"
# Where Docker and Podman mount secrets.
SECRETS_DIR = Path("/run/secrets")
CREDENTIALS_DIRECTORY = "CREDENTIALS_DIRECTORY"
# Sections with one table per name.
TABLES_BY_NAME: dict[str, type[BaseModel]] = {"fleets": FleetConfig, "adopt": AdoptionConfig}
PREFIX = "WINDLASS_"
FLEET_PREFIX = f"{PREFIX}FLEETS__"
FILE_SUFFIX = "_FILE"
COMMAND_PREFIX = "cmd:"
COMMAND_TIMEOUT_S = 30.0
MAX_SECRET_BYTES = 64 * 1024
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
# The first original orchestrator had one rule for scaling, and this variable. The later one had these.
_THRESHOLD_VARIABLE = "TASKS_PER_GPU_THRESHOLD"
_BUFFERED_VARIABLES = frozenset({"MACHINES_TO_KEEP_IDLE", "SCALE_UP_MULTIPLIER", "SCALE_DOWN_MULTIPLIER"})
# Variables of every original orchestrator of GPUs, and settings that only the later one had.
_LIMIT_VARIABLES = frozenset({"MIN_ACTIVE_GPUS", "MAX_ACTIVE_GPUS"})
_LATER_SETTINGS = frozenset({"min_scaling_interval_s", *IGNORED_BY_ADAPTIVE})
# The original orchestrators kept this many GPUs unless MIN_ACTIVE_GPUS was set.
_ORIGINAL_MIN_GPUS = 2


@dataclass(slots=True)
class RawSettings:
    """Values as they were given, before validation, and sentences about variables without effect."""

    values: Values
    warnings: list[str] = field(default_factory=list)


def read_sources(file: Path | None, file_named_by: str, environment: Mapping[str, str]) -> RawSettings:
    """Raises ConfigError. `file` must exist if given."""
    settings = RawSettings(_from_file(file, file_named_by))
    dotenv = _read_dotenv()
    # All fleets that a file or a variable with the fleet's name mentions.
    fleets = {key[1] for key in settings.values if key[0] == "fleets" and key[1:]}
    fleets |= {match[1].lower() for name in (*dotenv, *environment) if (match := _FLEET_VARIABLE.fullmatch(name))}
    in_file = settings.values
    settings.values = _from_variables(dotenv, str(DOTENV_FILE), fleets, settings.warnings)
    variables = _from_variables(environment, "the environment", fleets, settings.warnings)
    for values in (in_file, _from_mounts(environment), variables, _from_named_files(environment)):
        settings.warnings += overridden(settings.values, values)
        settings.values |= values
    _apply_original_behaviour(settings.values, {key[1] for key in in_file if key[0] == "fleets" and key[1:]})
    return settings


def fields(section: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Key and field of every setting of a section, except those of fleets and adopted tables."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, (*prefix, name))
        elif name not in TABLES_BY_NAME:
            yield (*prefix, name), info


def is_secret(info: FieldInfo) -> bool:
    return SecretStr in (info.annotation, *get_args(info.annotation))


def variable_of(key: Key) -> str:
    return PREFIX + "__".join(key).upper()


def secret_variables() -> dict[str, Key]:
    """Environment variables that hold secrets, or name their files, with their keys."""
    names = _secret_names()
    return names | {name + FILE_SUFFIX: key for name, key in names.items()}


def did_you_mean(name: str, known: list[str]) -> str:
    close = next((near for near in difflib.get_close_matches(name, known) if _is_near(name, near)), None)
    return (f"did you mean {close}? " if close else "") + "docs/configuration.md lists all settings"


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


def _read_dotenv() -> dict[str, str]:
    if not DOTENV_FILE.is_file():
        return {}
    return {
        name: value
        for name, value in dotenv_values(stream=io.StringIO(_read_text(DOTENV_FILE)), interpolate=False).items()
        if value is not None
    }


def _from_variables(variables: Mapping[str, str], origin: str, fleets: set[str], warnings: list[str]) -> Values:
    """Settings of the environment or of `.env`. A variable that looks like ours and is no setting is an error."""
    # Names with the prefix override aliases, which other programs read too.
    names = {**ENVIRONMENT_ALIASES, **{variable_of(key): key for key, _ in fields(Config)}}
    fleet_keys = {key for key, _ in fields(FleetConfig)}
    secret_files = {name for name in secret_variables() if name.endswith(FILE_SUFFIX)}
    for name, value in variables.items():
        fleet = _FLEET_VARIABLE.fullmatch(name)
        if fleet and (key := tuple(fleet[2].lower().split("__"))) in fleet_keys:
            names[name] = ("fleets", fleet[1].lower(), *key)
        is_known = name in names or name in NOT_SETTINGS or name in secret_files or not name.startswith(PREFIX)
        if value and not is_known and not _FROM_KUBERNETES.fullmatch(name):
            raise ConfigError(f"{name} in {origin} is not a setting: {did_you_mean(name, list(names))}.")
    values: Values = {}
    for name, named_key in names.items():
        if not variables.get(name):
            continue
        key = named_key
        if name in ENVIRONMENT_ALIASES and key[0] == "fleets":
            if len(fleets) > 1 and DEFAULT_FLEET not in fleets:
                warnings.append(
                    f"{name} in {origin} has no effect, because there are several fleets: "
                    f"set {'.'.join(key[2:])} of the fleet that it is meant for"
                )
                continue
            key = ("fleets", next(iter(fleets)) if len(fleets) == 1 else DEFAULT_FLEET, *key[2:])
        source = name if origin != str(DOTENV_FILE) else name + IN_DOTENV
        given: Values = {key: (_convert(name, variables[name], origin), source)}
        warnings += overridden(values, given)
        values |= given
    return values


def overridden(lower: Values, higher: Values) -> list[str]:
    """Sentences about the aliases in `lower` whose settings `higher` sets too.

    A person who brings the variables of another program may not know what else sets the same."""
    sentences = []
    for key, (_, source) in lower.items():
        name, stronger = source.removesuffix(IN_DOTENV), higher[key][1] if key in higher else source
        # A variable of the environment overrides the same one in `.env`, as everywhere.
        if name in ENVIRONMENT_ALIASES and stronger.removesuffix(IN_DOTENV) != name:
            where = source if source != name else f"{name} in the environment"
            sentences.append(f"{where} is overridden by {stronger}, which sets {'.'.join(key)}")
    return sentences


def _from_mounts(environment: Mapping[str, str]) -> Values:
    """Secrets in files that are named like their variable, in upper or lower case, with or without the prefix. systemd
    adds a prefix to each file of a folder: `LoadCredential=WINDLASS:/etc/windlass`."""
    folders = [SECRETS_DIR]
    if environment.get(CREDENTIALS_DIRECTORY):
        folders.append(Path(environment[CREDENTIALS_DIRECTORY]))
    values: Values = {}
    for folder in folders:
        for name, key in _secret_names().items():
            names = (name, name.lower(), f"{PREFIX}{name}", f"{PREFIX}{name.lower()}")
            path = next((folder / each for each in names if (folder / each).is_file()), None)
            if path is not None:
                values[key] = (_read_secret(path), str(path))
    return values


def _from_named_files(environment: Mapping[str, str]) -> Values:
    values: Values = {}
    for name, key in _secret_names().items():
        path = environment.get(name + FILE_SUFFIX)
        if not path:
            continue
        if environment.get(name):
            raise ConfigError(f"both {name} and {name}{FILE_SUFFIX} are set in the environment: set one of them.")
        values[key] = (_read_secret(Path(path).expanduser()), name + FILE_SUFFIX)
    return values


def _apply_original_behaviour(values: Values, fleets_in_file: set[str]) -> None:
    """Choose what the original orchestrators did, for a fleet that is configured by their variables."""
    for name in {key[1] for key in values if key[0] == "fleets" and key[1:]}:
        given = {key[2]: source for key, (_, source) in values.items() if key[:2] == ("fleets", name) and key[2:]}
        variables = {source.removesuffix(IN_DOTENV) for source in given.values()}
        chosen_by = {_THRESHOLD_VARIABLE} & variables
        is_on_runpod = values.get(("fleets", name, "provider"), ("local",))[0] == "runpod"
        is_like_original = is_on_runpod or name not in fleets_in_file
        if is_like_original and not chosen_by and not given.keys() & {*POLICY_SETTINGS, *_LATER_SETTINGS}:
            chosen_by = variables & _LIMIT_VARIABLES
        if chosen_by and "policy" not in given and not variables & _BUFFERED_VARIABLES:
            values["fleets", name, "policy"] = ("threshold", min(chosen_by))
        # Without a name of the originals, nothing says that their default is expected, and it costs money.
        has_original_name = bool(variables & ENVIRONMENT_ALIASES.keys())
        if is_on_runpod and name not in fleets_in_file and has_original_name and "min_workers" not in given:
            values["fleets", name, "min_workers"] = (_ORIGINAL_MIN_GPUS, "default of MIN_ACTIVE_GPUS")


def run_commands(values: Values) -> None:
    """Replace each secret, and each variable of workers, that is a command by what the command prints. ConfigError."""
    secrets = {key for key, info in fields(Config) if is_secret(info)}
    for key, (value, source) in values.items():
        is_variable_of_workers = key[0] == "fleets" and "env" in key[2:4]
        if (key in secrets or is_variable_of_workers) and isinstance(value, str) and value.startswith(COMMAND_PREFIX):
            values[key] = (_run_command(value.removeprefix(COMMAND_PREFIX), ".".join(key), source), source)


def _run_command(command: str, key: str, source: Source) -> str:
    """What a command prints, without the last line break. Its error messages may contain secrets and are not shown."""
    try:
        words = shlex.split(command)
        if not words:
            raise ConfigError(f"{key} (from {source}) names no program after {COMMAND_PREFIX}")
        result = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except ValueError as error:
        raise ConfigError(f"{key} (from {source}) is not a command: {error}.") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{key} (from {source}): {words[0]} took over {COMMAND_TIMEOUT_S:g} s.") from None
    except OSError as error:
        raise ConfigError(f"{key} (from {source}): cannot run {words[0]}: {error.strerror}.") from None
    if result.returncode != 0:
        raise ConfigError(
            f"{key} (from {source}): {words[0]} failed with exit code {result.returncode}. Run it by hand to see why."
        )
    return _checked_secret(result.stdout, f"{key} (from {source}): {words[0]} printed")


def _read_secret(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the secret in {path}: {error.strerror}.") from None
    return _checked_secret(content, f"{path} has")


def _checked_secret(content: bytes, what: str) -> str:
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{what} more than {MAX_SECRET_BYTES:,} bytes, which is no secret.")
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{what} bytes that are not UTF-8.") from None
    if not text:
        raise ConfigError(f"{what} no text.")
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}).") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None


def _convert(name: str, value: str, origin: str) -> Any:
    if name not in _IN_MINUTES:
        return value
    try:
        return float(value) * 60
    except ValueError:
        raise ConfigError(f"{name} in {origin} is {value!r}, which is not a number of minutes.") from None


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


def _secret_names() -> dict[str, Key]:
    secrets = {key for key, info in fields(Config) if is_secret(info)}
    aliases = {name: key for name, key in ENVIRONMENT_ALIASES.items() if key in secrets}
    return aliases | {variable_of(key): key for key in secrets}


def _aliases() -> dict[str, Key]:
    """Other names for settings than WINDLASS_<KEY> and WINDLASS_<SECTION>__<KEY>, such as DATABASE_URL."""
    return {
        env: key
        for key, info in (*fields(Config), *fields(FleetConfig, ("fleets", DEFAULT_FLEET)))
        if isinstance(info.json_schema_extra, dict)
        for env in str(info.json_schema_extra["env"]).split()
    }


ENVIRONMENT_ALIASES = _aliases()
