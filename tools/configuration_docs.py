"""Writes docs/configuration.md from the model: `python tools/configuration_docs.py`. A test keeps it current."""

import types
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from windlass.config_loader import PREFIX
from windlass.model.config import Config
from windlass.model.fleet import PROVIDER_DEFAULTS, FleetConfig
from windlass.model.worker import DEFAULT_FLEET, MAX_COUNT

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = f"""# Configuration

Written by `tools/configuration_docs.py` from the model; a test keeps it current.

Settings come from `windlass.toml` in the folder you are in (or the file named with `--config`), then the environment,
then the command line; the later is stronger. `windlass config show` prints every value and where it came from, without
secrets. A name that is no setting is refused wherever it stands, and every refusal names the key, the value and its
source.

- In the environment a key is `{PREFIX}<KEY>` or `{PREFIX}<SECTION>__<KEY>`, for a fleet
  `{PREFIX}FLEETS__<NAME>__<KEY>` or `{PREFIX}FLEETS__<NAME>__<SECTION>__<KEY>`. An empty variable counts as not set.
- The names in the column "also" are read too. For fleets they set the value of the fleet `{DEFAULT_FLEET}`, which they
  bring into being. `FAILURE_WINDOW_MINUTES` is in minutes; everything else is in the unit its key ends with.
- What is set of fleets concerns those who run or look at them. `windlass worker` and the Python client leave it out.
- A relative `data_dir` in a file named with `--config` is meant from where that file is; all else from the folder you
  are in.
- `--data-dir` on the command line chooses the embedded PostgreSQL, whatever `DATABASE_URL` says.
- `SUPABASE_URL` alone is refused: windlass speaks to the database itself, so `DATABASE_URL` (or `data_dir`) must say
  where it is. This is the one name of an older setup that does not work unchanged by itself.

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
"""


HEAD = ("| key | type | default | also | what it is |", "| --- | --- | --- | --- | --- |")
WORDS = {
    int: "whole number",
    float: "number",
    Decimal: "amount",
    str: "text",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret",
}


def render() -> str:
    sections: list[tuple[str, str, Iterable[tuple[str, FieldInfo]]]] = []
    top = [(name, field) for name, field in Config.model_fields.items() if not _is_section(field) and name != "fleets"]
    sections.append(("Everywhere", "At the top of the file.", top))
    for name, section in _parts(Config):
        sections += _sections(name, (section.__doc__ or "").strip(), section)
    providers = ", ".join(f"`{name}`" for name in PROVIDER_DEFAULTS)
    fleet = (
        f"One table per fleet. Defaults that depend on the provider ({providers}) are named with it. "
        f"Counts go up to {MAX_COUNT:,}, times up to ten years."
    )
    sections += _sections("fleets.NAME", fleet, FleetConfig)
    return INTRODUCTION + "".join(_section(title, text, fields) for title, text, fields in sections)


def _sections(
    path: str, text: str, section: type[BaseModel]
) -> Iterator[tuple[str, str, Iterable[tuple[str, FieldInfo]]]]:
    """A section and those inside it."""
    yield f"[{path}]", text, [(name, field) for name, field in section.model_fields.items() if not _is_section(field)]
    for name, inner in _parts(section):
        yield from _sections(f"{path}.{name}", (inner.__doc__ or "").strip(), inner)


def _parts(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation


def _section(title: str, text: str, fields: Iterable[tuple[str, FieldInfo]]) -> str:
    lines = [f"\n## {title}\n", f"{text}\n", *HEAD]
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
        return f"list of {'whole numbers' if parts[0] is int else 'text'}"
    if origin is dict:
        return "table of text"
    return WORDS[annotation]


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
