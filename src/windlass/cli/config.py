"""`windlass config`: what is set, and where it was set."""

from dataclasses import replace

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import print_json, print_table

app = typer.Typer(help="The configuration.", no_args_is_help=True)


@app.callback()
def _group() -> None: ...


@app.command()
@command
async def show(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show every setting and where it came from.

    Secrets are not shown, nor the password in a database's address.
    """
    from windlass.wiring import stores

    loaded = load(config, data_dir)
    settings = [
        # Not set is no answer to the question where the data is.
        replace(s, value=stores.data_dir(loaded.config)) if s.key == "data_dir" and s.value is None else s
        for s in loaded.settings()
    ]
    if as_json:
        print_json({s.key: {"value": s.shown(), "source": s.source, "description": s.description} for s in settings})
        return
    rows = [(s.key, _as_in_a_file(s.shown()), s.source, s.description) for s in settings]
    print_table(rows, "setting", "value", "from", "what it is")


def _as_in_a_file(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
