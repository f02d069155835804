"""`windlass up`, `windlass serve` and `windlass cycle`: the control loop and the servers, or one cycle."""

import os
import shlex
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass import __version__
from windlass.cli.config import log_settings, log_warnings
from windlass.cli.cycle_log import CycleLog
from windlass.cli.logs import LogFormat, add_tap, configure_logs, get_logger, hide
from windlass.cli.options import ConfigFile, DataDir, command, load, os_actor
from windlass.cli.output import print_json
from windlass.config_loader import Loaded, secrets_of
from windlass.model.actor import acting_as
from windlass.model.errors import BadInput, ConfigError
from windlass.model.worker import DEFAULT_FLEET
from windlass.wiring.processes import ServeOptions, run_serve, run_up
from windlass.wiring.providers import startup_problem
from windlass.wiring.signals import survive_hangup
from windlass.wiring.up import NO_FLEET, ControlOptions, run_cycles
from windlass.worker.handler_user import runs_handlers_as_root

Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", help="Queue of the fleet `default`. Repeat it for several queues.", metavar="NAME"),
]
Handler = Annotated[
    str | None,
    typer.Option(help="Python function that its workers run for each task.", metavar="PACKAGE.MODULE:FUNCTION"),
]
Exec = Annotated[
    str | None,
    typer.Option("--exec", help="Command that its workers run for each task, instead of a handler.", metavar="COMMAND"),
]
Chdir = Annotated[Path | None, typer.Option(help="Working directory of its workers.", metavar="FOLDER")]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", "-c", min=1, help="Tasks that a worker runs at the same time.", metavar="N"),
]
Inline = Annotated[bool, typer.Option("--inline", help="Run an async handler in the worker's own event loop.")]
Min = Annotated[int | None, typer.Option("--min", min=0, help="Minimum number of workers.", metavar="N")]
Max = Annotated[int | None, typer.Option("--max", min=1, help="Maximum number of workers.", metavar="N")]
Host = Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).", metavar="ADDRESS")]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65_535,
        help="Serve the dashboard, the API and remote workers on this port; 0 for any free port.",
        metavar="PORT",
    ),
]


NoServe = Annotated[bool, typer.Option("--no-serve", help="Run the control loop alone, even if a port is configured.")]


@command
def up(
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
    no_serve: NoServe = False,
    leave_workers: Annotated[
        bool, typer.Option("--leave-workers", help="Keep the workers running when it stops.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Replace workers when their code or settings change. For development.")
    ] = False,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> int:
    """Run the fleets in windlass.toml: spawn, supervise and terminate workers.

    The options from --queue to --max configure the fleet `default`. They add this fleet, or override its settings in
    the file. With a port, the same program also runs HTTP servers; see --no-serve and `windlass serve`. Ctrl-C drains
    the workers, then stops; see --leave-workers.
    """
    configure_logs(log_format)

    # Logged once everything is checked: the only line about a mistake is the error.
    latest: deque[Loaded] = deque(maxlen=1)

    def load_now() -> Loaded:
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
        if latest:  # a reload; log_start logs those of the start
            log_warnings(loaded, latest[0].warnings)
        latest.append(loaded)
        cycle_log.announce(loaded.config)
        return loaded

    def log_start() -> None:
        log_settings(latest[0])
        _warn_of_root(latest[0])

    options = {"--config": config, "--data-dir": data_dir}
    cycle_log = CycleLog("".join(f" {name} {shlex.quote(str(value))}" for name, value in options.items() if value))
    control = ControlOptions(
        load_now,
        cycle_log.write,
        keeps_workers=leave_workers,
        version=__version__,
        tap=add_tap,
        on_start=log_start,
        is_watching=watch,
    )
    return run_up(control, serve_options(), has_servers=not no_serve)


@command
def serve(
    host: Host = None,
    port: Port = None,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> int:
    """Run HTTP servers alone, for a control loop that runs elsewhere.

    Any number of hosts may run it, behind a load balancer. Each needs the database and the same windlass.toml as
    `windlass up`. Ctrl-C finishes the running requests, then stops.
    """
    configure_logs(log_format)

    def load_now() -> Loaded:
        chosen: dict[str, Any] = {"api.host": host, "api.port": port}
        loaded = load(config, data_dir, **chosen)
        hide(secrets_of(loaded.config))
        if latest:
            log_warnings(loaded, latest[0].warnings)
        latest.append(loaded)
        return loaded

    latest: deque[Loaded] = deque(maxlen=1)
    return run_serve(load_now, serve_options(), on_start=lambda: log_settings(latest[0]))


def serve_options() -> ServeOptions:
    return ServeOptions(
        __version__,
        on_dashboard=_print_dashboard,
        on_config=lambda config: hide(secrets_of(config)),
        tap=add_tap,
    )


async def _print_dashboard(url: str, create_link: Callable[[], Awaitable[str]] | None) -> None:
    """A login link is printed to a terminal only: it is a credential, and others may read a file or a journal."""
    if create_link is not None and sys.stdout is not None and sys.stdout.isatty():
        with acting_as(os_actor()):
            link = await create_link()
        print(f"dashboard: {link}", flush=True)
    else:
        print(f"dashboard: {url}/ (`windlass tokens link` prints a login link)", flush=True)


@command
async def cycle(
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Run one control cycle of every fleet and print a summary as JSON.

    For cron and Kubernetes CronJobs. While another orchestrator is the leader, nothing is changed, `is_leader` is
    false, and the exit code is 0.
    """
    # A cycle that ends between a create request and its record would leave an orphaned machine.
    survive_hangup()
    configure_logs("auto")
    loaded = load(config, data_dir)
    hide(secrets_of(loaded.config))
    if not loaded.config.fleets:
        raise BadInput(f"{NO_FLEET}.")
    check_fleets(loaded)
    done = await run_cycles(loaded.config, __version__, lambda: log_settings(loaded))
    summaries = [summary.to_plain() for summary in done]
    print_json(summaries[0] if len(summaries) == 1 else summaries)


def check_fleets(loaded: Loaded) -> None:
    """Raise an error if workers of a fleet cannot start, as far as that is cheap to check.

    Otherwise each launch would fail, and only a log would have the reason.
    """
    for name, fleet in loaded.config.fleets.items():
        if fleet.handler is None and fleet.exec is None:
            # A variable that other programs read too, such as MAX_ACTIVE_GPUS, may create a fleet by accident.
            sources = [source for key, source in loaded.sources.items() if key[:2] == ("fleets", name)]
            is_from_environment = bool(sources) and all(source in os.environ for source in sources)
            origin = f" (created by {sources[0]} in the environment)" if is_from_environment else ""
            options = ", or give --handler or --exec" if name == DEFAULT_FLEET else ""
            raise BadInput(f"fleet {name}{origin} has nothing to run: set its handler or exec{options}.")
        if fleet.is_of_this_host and fleet.chdir is not None and not fleet.chdir.is_dir():
            source = loaded.source(f"fleets.{name}.chdir")
            raise ConfigError(f"fleets.{name}.chdir (from {source}) is {fleet.chdir}: folder not found.")
        if fleet.provider == "local":
            problem = startup_problem(name, fleet)
            if problem is not None:
                raise ConfigError(problem)


def _warn_of_root(loaded: Loaded) -> None:
    """Warn: handlers run code that tasks and packages bring, and that code owns the host if it runs as root."""
    for name, fleet in loaded.config.fleets.items():
        if fleet.is_of_this_host and runs_handlers_as_root(fleet.run_as):
            hint = (
                f"set fleets.{name}.run_as to another user" if fleet.provider == "local" else "run up as another user"
            )
            get_logger("windlass.up").warning("run handlers as root", fleet=name, hint=hint)
