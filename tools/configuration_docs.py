"""Generates docs/configuration.md from the model: `python tools/configuration_docs.py`. A test compares them."""

import re
import types
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from windlass.config_sources import PREFIX, TABLES_BY_NAME
from windlass.model.adoption import MAX_ADOPTION_NAME, AdoptionConfig
from windlass.model.config import Config
from windlass.model.fleet import FleetConfig
from windlass.model.provider_defaults import PROVIDER_DEFAULTS
from windlass.model.worker import DEFAULT_FLEET, MAX_COUNT

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = f"""# Configuration

A file `windlass.toml` in the current folder is enough for most set-ups.
`windlass init` [writes one](deployment.md#start-a-project).

```toml
database_url = "postgresql://app@db.example.com/app"

[control]
lease_s = 30

[fleets.renders]
queues = ["renders"]
handler = "app:generate"
min_workers = 0
max_workers = 8
```

`windlass config show` prints every setting, its value and its source, without secrets.

## Sources

Settings are read from these sources; later sources override earlier ones.

| source | example |
| --- | --- |
| `.env` in the current folder: the variables below, for settings only | `RUNPOD_API_KEY=...` |
| `windlass.toml` in the current folder, or the file given with `--config` | `max_payload_bytes = 4096` |
| secrets: a file called like the variable in `$CREDENTIALS_DIRECTORY` (systemd) or `/run/secrets` (Docker) | \
`/run/secrets/database_url` |
| environment variables that other programs use too, in the column "also" | `DATABASE_URL` |
| environment variables `{PREFIX}<KEY>` and `{PREFIX}<SECTION>__<KEY>` | `{PREFIX}WORKER__LEASE_S=60` |
| the same for a fleet: `{PREFIX}FLEETS__<NAME>__<KEY>` | `{PREFIX}FLEETS__RENDERS__MAX_WORKERS=4` |
| secrets: a file named by the variable with `_FILE` | `RUNPOD_API_KEY_FILE=/etc/windlass/runpod` |
| options of the command line | `windlass up --max 4` |

- An empty environment variable counts as not set.
- Lists in environment variables are separated by commas.
- A name that is not a setting is an error, in every source.
  The message names the key, its value and its source.
- Fleet settings are read by `up`, `cycle` and the status commands only.
  `windlass worker` and the Python client ignore them.
- In the column "also", names of fleet settings configure the only fleet.
  Without a fleet they create the fleet `{DEFAULT_FLEET}`.
  With several fleets they configure `{DEFAULT_FLEET}`, or have no effect if there is no fleet of that name.
- `windlass up` logs all settings with their sources at start, without secrets.
  Lines for a person at a terminal have their number per source only; `windlass config show` lists all.
- `windlass up` and `windlass doctor` warn about each setting that has no effect.
  They also warn about each variable of the column "also" whose setting another source overrides.
- The unit of a setting is the end of its key: `_s` is seconds.
  The only exception is the variable `FAILURE_WINDOW_MINUTES`.
- A relative `data_dir` in a file given with `--config` is relative to that file.
  All other paths are relative to the current folder.
- `--data-dir` selects the embedded PostgreSQL, even if `DATABASE_URL` is set.

## Secrets

Every setting of type "secret" can come from a file or a command, so that a secret manager needs no code:

```toml
runpod_api_key = "cmd:op read op://infra/runpod/key"

[fleets.renders.env]
HF_TOKEN = "cmd:vault kv get -field=token secret/hugging-face"
```

- A value that begins with `cmd:` is replaced by what the command prints.
  The command runs without a shell, for at most 30 seconds, each time the configuration is loaded.
- `cmd:` also works for the variables in `env` of a fleet.
- A file may end with a line break, which is removed.
- Kubernetes: mount the secret as a file and set `DATABASE_URL_FILE`, or set the variable from the secret.
- systemd: `LoadCredential=WINDLASS:/etc/windlass` for each file of that folder, or
  `LoadCredential=DATABASE_URL:/etc/windlass/DATABASE_URL` for one; what is named must exist.

## Names of the original orchestrators

The original orchestrators are the [earlier systems](architecture.md#how-conflicting-requirements-were-decided) that
Windlass joins.
Their environment variables still work.

- A fleet that sets `TASKS_PER_GPU_THRESHOLD` and none of `MACHINES_TO_KEEP_IDLE`, `SCALE_UP_MULTIPLIER` and
  `SCALE_DOWN_MULTIPLIER` uses the policy `threshold`, unless `policy` is set.
- A Runpod fleet with `MIN_ACTIVE_GPUS` or `MAX_ACTIVE_GPUS` uses `threshold` too, unless it has a setting of another
  policy; so does any fleet that is configured by variables alone.
  Ten queued tasks then start four GPUs, as the first original did.
  Names that only the later original had select `buffered`.
- A Runpod fleet that is configured by variables alone, at least one of them an original's, keeps at least two workers,
  as the original did.
  Every other fleet, in `windlass.toml` or with `WINDLASS_FLEETS__` names only, has `min_workers = 0` unless it is set.
- `GPU_IDLE_TIMEOUT_SEC` is the heartbeat timeout.
  One of the original documents used it for idle workers instead; here that is `GPU_OVERCAPACITY_IDLE_TIMEOUT_SEC`.
- If two variables set the same setting, for example `RGRID_MAX_WORKERS` and `MAX_ACTIVE_GPUS`, the last name applies.
- `windlass up` and `windlass doctor` name each of these variables that has no effect or is overridden.

## Limits

- `SUPABASE_URL` alone is an error, also in a `.env` of the original orchestrators.
  Windlass connects to the database itself, so it needs `DATABASE_URL` or `data_dir`.
- `SUPABASE_SERVICE_ROLE_KEY` has no effect, except that it is masked in logs and not passed to workers.
- A name that has no effect for the fleet's policy, provider, missing GPU or missing network volume is accepted.
  `windlass up` names it at start and after a reload, `windlass cycle` each time, and so does `windlass doctor`.

The tables below are generated by `tools/configuration_docs.py`.
"""


HEAD = ("| key | type | default | also | description |", "| --- | --- | --- | --- | --- |")
TYPE_NAMES = {
    int: "integer",
    float: "number",
    Decimal: "amount",
    str: "text",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret",
}


def render() -> str:
    sections: list[tuple[str, str, Iterable[tuple[str, FieldInfo]]]] = []
    top = [
        (name, field)
        for name, field in Config.model_fields.items()
        if not _is_section(field) and name not in TABLES_BY_NAME
    ]
    sections.append(("Top level", "At the top of the file, before any table.", top))
    for name, section in _parts(Config):
        sections += _sections(name, (section.__doc__ or "").strip(), section)
    providers = ", ".join(f"`{name}`" for name in PROVIDER_DEFAULTS)
    fleet = (
        f"One table per fleet.\nSome defaults depend on the provider ({providers}).\n"
        f"Counts are at most {MAX_COUNT:,}, times at most ten years."
    )
    sections += _sections("fleets.NAME", fleet, FleetConfig)
    adopted = (
        "A table of your own program whose rows are tasks: [Adopt an existing table](adopt.md).\n"
        f"NAME has at most {MAX_ADOPTION_NAME} characters."
    )
    sections += _sections("adopt.NAME", adopted, AdoptionConfig)
    return INTRODUCTION + "".join(_section(title, text, fields) for title, text, fields in sections)


def _sections(
    path: str, text: str, section: type[BaseModel]
) -> Iterator[tuple[str, str, Iterable[tuple[str, FieldInfo]]]]:
    """A section and its subsections."""
    yield f"[{path}]", text, [(name, field) for name, field in section.model_fields.items() if not _is_section(field)]
    for name, inner in _parts(section):
        yield from _sections(f"{path}.{name}", (inner.__doc__ or "").strip(), inner)


def _parts(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation


def _section(title: str, text: str, fields: Iterable[tuple[str, FieldInfo]]) -> str:
    one_per_line = re.sub(r"(?<=\.) (?=[A-Z])", "\n", text)
    lines = [f"\n## {title}\n", f"{one_per_line}\n", *HEAD]
    is_fleet = title == "[fleets.NAME]"
    for name, field in fields:
        default = _default(name, field, is_fleet=is_fleet)
        lines.append(f"| `{name}` | {_type(field.annotation)} | {default} | {_names(field)} | {field.description} |")
    return "\n".join(lines) + "\n"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _default(name: str, field: FieldInfo, *, is_fleet: bool) -> str:
    by_provider = [(p, values[name]) for p, values in PROVIDER_DEFAULTS.items() if is_fleet and name in values]
    if len(by_provider) == len(PROVIDER_DEFAULTS) and len({value for _, value in by_provider}) == 1:
        return _shown(by_provider[0][1])
    return ", ".join(
        [_shown(field.get_default()), *(f"{provider}: {_shown(value)}" for provider, value in by_provider)]
    )


def _shown(value: Any) -> str:
    if value is None or value in ({}, ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int):
        return f"{value:,.10g}".replace(",", " ") if value >= 10_000 else f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{value}`"


def _names(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return ", ".join(f"`{name}`" for name in str(extra["env"]).split()) if isinstance(extra, dict) else ""


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {'integers' if parts[0] is int else 'text'}"
    if origin is dict:
        return "table of text"
    return TYPE_NAMES[annotation]


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
