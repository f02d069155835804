"""The program `windlass`."""

from typing import Annotated

import typer

from windlass import __version__
from windlass.cli import db, worker

app = typer.Typer(
    name="windlass",
    help="Elastic workers for a PostgreSQL task queue.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(db.app, name="db")
app.command()(worker.worker)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None: ...


def main() -> None:
    app(prog_name="windlass")
