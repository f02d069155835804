"""`windlass up` and `cycle`: the control loop, as a daemon or once."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass import __version__
from windlass.cli.common import ConfigFile, DataDir, command, load
from windlass.cli.logs import LogFormat, configure_logs, hide, tap
from windlass.cli.output import print_json
from windlass.model.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from windlass.config_loader import Loaded
    from windlass.control.summary import Summary

Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", help="Queue of the fleet `default`; several times for several.", metavar="NAME"),
]
Handler = Annotated[str | None, typer.Option(help="What its workers run.", metavar="PACKAGE.MODULE:FUNCTION")]
Exec = Annotated[str | None, typer.Option("--exec", help="Or the command they run per task.", metavar="COMMAND")]
Chdir = Annotated[Path | None, typer.Option(help="The folder its workers work in.", metavar="FOLDER")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", "-c", min=1, help="Tasks a worker runs at once.", metavar="N")
]
Inline = Annotated[bool, typer.Option("--inline", help="Run an async handler in the worker's own loop.")]
Min = Annotated[int | None, typer.Option("--min", min=0, help="Never fewer workers than this.", metavar="N")]
Max = Annotated[int | None, typer.Option("--max", min=1, help="Never more workers than this.", metavar="N")]
Host = Annotated[str | None, typer.Option(help="Where to listen for machines (default 127.0.0.1).", metavar="ADDRESS")]
Port = Annotated[
    int | None,
    typer.Option(
        min=0, max=65_535, help="Serve the dashboard, the API, and machines that work over HTTP.", metavar="PORT"
    ),
]


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
    """Run every fleet of windlass.toml on this host: hire, heal, let go.

    The options from --queue to --max describe the fleet `default`: one more beside those of the file, or, if the file
    has it too, the same with these settings changed.
    """
    from windlass.config_loader import secrets_of
    from windlass.wiring.up import run_up

    configure_logs(log_format)

    def load_now() -> "Loaded":
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
        chosen: dict[str, Any] = {f"fleets.default.{name}": value for name, value in given.items()}
        chosen |= {"api.host": host, "api.port": port}
        loaded = load(config, data_dir, **chosen)
        check_fleets(loaded)
        hide(secrets_of(loaded.config))
        return loaded

    await run_up(
        load_now,
        Narrator().tell,
        keeps_workers=leave_workers,
        version=__version__,
        # Not into the log: it lets one browser in.
        on_link=lambda link: print(f"dashboard: {link}", flush=True),
        tap=tap,
    )


@command
async def cycle(
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="As without it: this command always prints JSON.")] = False,
) -> None:
    """Run one cycle of every fleet, print what it did as JSON, and end: for cron and the like.

    While another orchestrator leads nothing is done, and `is_leader` is false: no error, so the exit code is 0.
    """
    from windlass.config_loader import secrets_of
    from windlass.wiring.up import NO_FLEET, run_cycles

    del as_json
    configure_logs("auto")
    loaded = load(config, data_dir)
    hide(secrets_of(loaded.config))
    if not loaded.config.fleets:
        raise BadInput(f"{NO_FLEET}.")
    check_fleets(loaded)
    summaries = [summary.to_plain() for summary in await run_cycles(loaded.config)]
    print_json(summaries[0] if len(summaries) == 1 else summaries)


def check_fleets(loaded: "Loaded") -> None:
    """Raise an error unless every fleet has what its workers need to start, as far as that is cheap to see: whoever
    cannot start costs a launch each time, and the reason stands in a log."""
    from windlass.providers.local.spawn import startup_problem

    for name, fleet in loaded.config.fleets.items():
        if fleet.handler is None and fleet.exec is None:
            raise BadInput(f"fleet {name}{_made_by(loaded, name)} has nothing to run: set its handler or exec.")
        if fleet.is_of_this_host and fleet.chdir is not None and not fleet.chdir.is_dir():
            source = loaded.source(f"fleets.{name}.chdir")
            raise ConfigError(f"fleets.{name}.chdir (from {source}) is {fleet.chdir}: there is no such folder.")
        if fleet.provider == "local":
            problem = startup_problem(name, fleet, fleet.env.get("PATH", os.environ.get("PATH")))
            if problem is not None:
                raise ConfigError(problem)


def _made_by(loaded: "Loaded", fleet: str) -> str:
    """Said of a fleet that nobody meant to have: a variable that others read too may bring one into being."""
    sources = [source for key, source in loaded.sources.items() if key[:2] == ("fleets", fleet)]
    is_of_environment = all(source in os.environ for source in sources)
    return f" (which {sources[0]} in the environment makes)" if sources and is_of_environment else ""


class Narrator:
    """Logs a cycle when it did something, or decided otherwise than the one before; and who failed, and why."""

    def __init__(self) -> None:
        import structlog

        self._log: Any = structlog.get_logger("windlass.up")
        self._last: dict[str, tuple[bool, str, str | None]] = {}

    def tell(self, summary: "Summary") -> None:
        kind = summary.decision.partition(":")[0]
        now = (summary.is_leader, kind, summary.hold)
        for worker_id, code, reason in summary.failures:
            self._log.warning("worker failed", fleet=summary.fleet, worker=worker_id, code=code, reason=reason)
        for code, reason in summary.alerts:
            self._log.warning("alert", fleet=summary.fleet, code=code, reason=reason)
        did = {name: count for name, count in (summary.actions or {}).items() if count}
        if not did and self._last.get(summary.fleet) == now:
            return
        self._last[summary.fleet] = now
        if not summary.is_leader:
            self._log.info("standing by: another orchestrator leads", fleet=summary.fleet)
        else:
            self._log.info(summary.decision, fleet=summary.fleet, cycle=summary.cycle_id, **did)
