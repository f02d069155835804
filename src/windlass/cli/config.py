"""`windlass config`, and the log entry at start: every setting, its value and its source, without secrets."""

from collections.abc import Collection
from dataclasses import replace

import typer

from windlass.cli.logs import get_logger
from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, print_table
from windlass.config_loader import Loaded
from windlass.wiring import stores

log = get_logger(__name__)

app = typer.Typer(help="Show the configuration.", no_args_is_help=True)


@app.callback()
def _group() -> None: ...


@app.command()
@command
async def show(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show every setting, its value and its source.

    Secrets and the passwords in URLs are masked.
    """
    loaded = load(config, data_dir)
    settings = [
        # Show the default folder instead of an empty value.
        replace(s, value=stores.data_dir(loaded.config)) if s.key == "data_dir" and s.value is None else s
        for s in loaded.settings()
    ]
    if as_json:
        print_json({s.key: {"value": s.shown(), "source": s.source, "description": s.description} for s in settings})
        return
    rows = []
    for setting in settings:
        value = setting.shown()
        # TOML writes booleans in lower case.
        text = str(value).lower() if isinstance(value, bool) else value
        rows.append((setting.key, text, setting.source, setting.description))
    print_table(rows, "setting", "value", "source", "description")


def log_settings(loaded: Loaded) -> None:
    """Log all settings with their sources, and those that have no effect.

    Lines for a person have their number per source only (human_log.py).
    """
    settings = {s.key: {"value": s.shown(), "source": s.source} for s in loaded.settings()}
    log.info("loaded configuration", settings=settings)
    log_warnings(loaded)


def log_warnings(loaded: Loaded, known: Collection[str] = ()) -> None:
    """Log the settings that have no effect, except those that were logged before."""
    for warning in loaded.warnings:
        if warning not in known:
            log.warning("ignore setting", reason=warning)
