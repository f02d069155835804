"""`windlass up` and `cycle`: the control loop, as a daemon or once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass import __version__
from windlass.cli.common import ConfigFile, DataDir, command, load
from windlass.cli.logs import LogFormat, configure_logs
from windlass.cli.output import print_json
from windlass.model.errors import BadInput

if TYPE_CHECKING:
    from windlass.configure import Loaded
    from windlass.control.summary import Summary

Queues = Annotated[
    list[str] | None, typer.Option("--queue", "-q", help="Queue of the fleet `default`; several times for several.")
]
Handler = Annotated[str | None, typer.Option(help="What its workers run.", metavar="PACKAGE.MODULE:FUNCTION")]
Exec = Annotated[str | None, typer.Option("--exec", help="Or the command they run per task.", metavar="COMMAND")]
Chdir = Annotated[Path | None, typer.Option(help="The folder its workers work in.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", "-c", min=1, help="Tasks a worker runs at once.")]
Inline = Annotated[bool, typer.Option("--inline", help="Run an async handler in the worker's own loop.")]
Min = Annotated[int | None, typer.Option("--min", min=0, help="Never fewer workers than this.")]
Host = Annotated[str | None, typer.Option(help="Where to listen for machines (default 127.0.0.1).", metavar="ADDRESS")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65_535, help="Listen for machines that work over HTTP.", metavar="PORT")
]
Max = Annotated[int | None, typer.Option("--max", min=1, help="Never more workers than this.")]


@command
async def up(
    queue: Queues = None,
    handler: Handler = None,
    exec_: Exec = None,
    chdir: Chdir = None,
    concurrency: Concurrency = None,
    inline: Inline = False,
    min_: Min = None,
    max_: Max = None,
    host: Host = None,
    port: Port = None,
    leave_workers: Annotated[
        bool, typer.Option("--leave-workers", help="When told to stop, let workers go on without it.")
    ] = False,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Run every fleet of windlass.toml on this host: hire, heal, let go. Or one fleet, from the options given here."""
    from windlass import wire

    configure_logs(log_format)

    def load_again() -> "Loaded":
        given = {
            "queues": queue or None,
            "handler": handler,
            "exec": exec_,
            "chdir": chdir and chdir.absolute(),
            "concurrency": concurrency,
            "is_inline": inline or None,
            "min_workers": min_,
            "max_workers": max_,
        }
        of_fleet = {f"fleets.default.{name}": value for name, value in given.items()}
        loaded = load(config, data_dir, **of_fleet, **{"api.host": host, "api.port": port})
        check_fleets(loaded)
        return loaded

    await wire.run_up(load_again(), load_again, Narrator().tell, is_leaving_workers=leave_workers, version=__version__)


@command
async def cycle(config: ConfigFile = None, data_dir: DataDir = None) -> None:
    """Run one cycle of every fleet, print what it did as JSON, and end: for cron and the like."""
    from windlass import wire

    configure_logs("auto")
    loaded = load(config, data_dir)
    check_fleets(loaded)
    summaries = [summary.to_plain() for summary in await wire.run_cycles(loaded.config)]
    print_json(summaries[0] if len(summaries) == 1 else summaries)


def check_fleets(loaded: "Loaded") -> None:
    """Raise BadInput unless there is a fleet, and every fleet knows what to run."""
    fleets = loaded.config.fleets
    if not fleets:
        raise BadInput(
            "there is no fleet: give --queue and --handler, or write a table [fleets.NAME] into windlass.toml."
        )
    for name, fleet in fleets.items():
        if fleet.handler is None and fleet.exec is None:
            raise BadInput(f"fleet {name} has nothing to run: set its handler or exec.")


class Narrator:
    """Logs a cycle when it did something, or decided otherwise than the one before."""

    def __init__(self) -> None:
        import structlog

        self._log: Any = structlog.get_logger("windlass.up")
        self._last: dict[str, tuple[bool, str, str | None]] = {}

    def tell(self, summary: "Summary") -> None:
        kind = summary.decision.partition(":")[0]
        now = (summary.is_leader, kind, summary.hold)
        did = {name: count for name, count in (summary.actions or {}).items() if count}
        if not did and self._last.get(summary.fleet) == now:
            return
        self._last[summary.fleet] = now
        if not summary.is_leader:
            self._log.info("standing by: another orchestrator leads", fleet=summary.fleet)
        else:
            self._log.info(summary.decision, fleet=summary.fleet, cycle=summary.cycle_id, **did)
