"""`windlass worker`: claim tasks and run a handler for each."""

import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass import __version__
from windlass.cli.errors import EXIT_BAD_INPUT, EXIT_LOST, print_error
from windlass.cli.logs import LogFormat, add_tap, configure_logs, get_logger, hide
from windlass.cli.options import ConfigFile, DataDir, command, load
from windlass.cli.worker_env import SpawnedWorkerEnv
from windlass.config_loader import secrets_of
from windlass.model.auth import API_PREFIX, is_token
from windlass.model.errors import BadInput, TokenRefused
from windlass.model.json_path import parse_path
from windlass.model.redaction import secrets_in
from windlass.model.task import check_queue_name
from windlass.model.urls import problem_of_control_plane_url
from windlass.model.worker import MAX_CONCURRENCY
from windlass.wiring.worker import HandlerChoice, run_joined_worker, run_self_registered_worker, run_worker
from windlass.worker.handler_user import runs_handlers_as_root
from windlass.worker.lifecycle import ExitReason, WorkerSettings
from windlass.worker.nonblocking_stderr import standard_error

# Time for Python to exit after the worker has deregistered. Threads and tasks of handlers may delay it.
EXIT_TIMEOUT_S = 5.0
# Time to write the last log lines, in case nothing reads them.
FLUSH_TIMEOUT_S = 3.0
# Longer than any token.
MAX_TOKEN_FILE_CHARACTERS = 1_000


@command
async def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", "-q", help="Queue to serve. Repeat it for several queues.", metavar="NAME"),
    ] = None,
    handler: Annotated[
        str | None, typer.Option(help="Python function to call for each task.", metavar="PACKAGE.MODULE:FUNCTION")
    ] = None,
    exec_: Annotated[
        str | None,
        typer.Option("--exec", help="Command to run for each task: JSON on stdin, JSON on stdout.", metavar="COMMAND"),
    ] = None,
    inline: Annotated[
        bool,
        typer.Option(
            "--inline", help="Run an async handler in the worker's own event loop: fast, but a crash ends the worker."
        ),
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            max=MAX_CONCURRENCY,
            help="Tasks to run at the same time (default 1).",
            metavar="N",
        ),
    ] = None,
    chdir: Annotated[
        Path | None, typer.Option(help="Working directory; handlers are imported from it.", metavar="FOLDER")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Time limit of an attempt, for tasks without their own.", metavar="SECONDS")
    ] = None,
    heartbeat_interval: Annotated[
        float | None, typer.Option(help="Interval between heartbeats.", metavar="SECONDS")
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(help="Its tasks are requeued if no heartbeat arrives for this long.", metavar="SECONDS"),
    ] = None,
    memory_limit_mb: Annotated[
        int | None, typer.Option(help="Memory limit of one handler process.", metavar="MB")
    ] = None,
    run_as: Annotated[
        str | None,
        typer.Option(help="User to run the handler or command as. The worker must run as root.", metavar="USER"),
    ] = None,
    redact: Annotated[
        list[str] | None,
        typer.Option(help="Part of the payload that errors must not quote, such as $.prompt.", metavar="PATH"),
    ] = None,
    join: Annotated[
        Path | None,
        typer.Option(help="Join the control plane named in this file. It sends all other settings.", metavar="FILE"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Connect to this control plane over HTTP, with a token of role worker in WINDLASS_TOKEN.",
            metavar="https://HOST",
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for --url, instead of WINDLASS_TOKEN.", metavar="FILE")
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="CA certificate (PEM) of --url, if it is not publicly trusted.", metavar="FILE"),
    ] = None,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> int:
    """Claim tasks and run a handler for each.

    Ctrl-C or SIGTERM drains the worker: it finishes its current tasks, then exits. A second signal, at least half a
    second later, requeues them and exits at once.
    """
    configure_logs(log_format)
    if join is not None:
        given = (queue, handler, exec_, inline or None, concurrency, chdir, timeout, heartbeat_interval, lease, redact)
        if any(
            value is not None for value in (*given, memory_limit_mb, run_as, url, token_file, ca_file, config, data_dir)
        ):
            raise BadInput("--join cannot be combined with other options: the control plane sends the settings.")
        return await _exit_code_of(run_joined_worker(join, __version__))
    if not queue:
        raise BadInput("no queue to serve: pass --queue, or --join for a control plane.")
    if (handler is None) == (exec_ is None):
        raise BadInput("pass exactly one of --handler and --exec.")
    if inline and handler is None:
        raise BadInput("--inline needs --handler: a command cannot run inside the worker.")
    if inline and run_as is not None:
        raise BadInput("--run-as cannot be combined with --inline: an inline handler has the worker's user.")
    for path in redact or ():
        _check_path(path)
    if url is None and (token_file is not None or ca_file is not None):
        option = "--token-file" if token_file is not None else "--ca-file"
        raise BadInput(f"{option} needs --url, the address of the control plane.")
    api_token = _api_token(url, token_file) if url is not None else ""
    spawned = SpawnedWorkerEnv.take_from_environment()
    loaded = load(
        config,
        data_dir,
        has_fleets=False,
        **{
            "database_url": spawned.database_url,
            "worker.heartbeat_interval_s": heartbeat_interval,
            "worker.lease_s": lease,
            "worker.timeout_s": timeout,
            "worker.memory_limit_mb": memory_limit_mb,
        },
    )
    hide({*secrets_of(loaded.config), *secrets_in(os.environ), api_token, spawned.secret or ""})
    if chdir is not None:
        try:
            os.chdir(chdir)
        except OSError as error:
            raise BadInput(f"cannot change to the folder {chdir}: {error.strerror}. Check --chdir.") from None
    if spawned.worker_id is None and runs_handlers_as_root(run_as):
        _warn_of_root_when_registered()
    chosen = loaded.config.worker
    settings = WorkerSettings(
        queues=tuple(check_queue_name(name) for name in dict.fromkeys(queue)),
        fleet=spawned.fleet,
        worker_id=spawned.worker_id,
        concurrency=concurrency or 1,
        heartbeat_interval_s=chosen.heartbeat_interval_s,
        lease_s=chosen.lease_s,
        timeout_s=chosen.timeout_s,
        drain_timeout_s=chosen.drain_timeout_s,
        version=__version__,
        needs_gpu=spawned.needs_gpu,
    )
    choice = HandlerChoice(handler, exec_, inline, run_as, redact or ())
    if url is None:
        return await _exit_code_of(run_worker(loaded.config, settings, choice, secret=spawned.secret))
    return await _exit_code_of(
        run_self_registered_worker(
            loaded.config, settings, choice, url=url.rstrip("/"), api_token=api_token, ca_file=ca_file
        )
    )


def _check_path(path: str) -> None:
    try:
        parse_path(path)
    except ValueError as error:
        raise BadInput(f"--redact: {error}.") from None


def _warn_of_root_when_registered() -> None:
    """Not before: the only line of a worker that cannot start is its error."""

    def see(entry: Mapping[str, Any]) -> None:
        if entry.get("event") == "registered worker":
            get_logger("windlass.worker").warning("run handlers as root", hint="pass --run-as USER")

    add_tap(see)


def _api_token(url: str, file: Path | None) -> str:
    """The token for --url. Removes it from the environment, so that handlers do not see it."""
    problem = problem_of_control_plane_url(url.rstrip("/"))
    if problem is not None:
        raise BadInput(f"--url {problem}.")
    token = os.environ.pop("WINDLASS_TOKEN", "")
    if file is not None:
        try:
            token = file.read_text()[:MAX_TOKEN_FILE_CHARACTERS]
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read the token file {file}: {type(error).__name__}. Check --token-file.") from None
    if not is_token(token.strip(), API_PREFIX):
        where = f"in {file}" if file is not None else "in WINDLASS_TOKEN"
        raise BadInput(
            f"no token {where} (a token begins with {API_PREFIX}). Create one with "
            "`windlass tokens create NAME --role worker`."
        )
    return token.strip()


async def _exit_code_of(work: Awaitable[ExitReason]) -> int:
    """Run the worker to its end. The process then exits within EXIT_TIMEOUT_S, even if a handler left work behind."""
    try:
        exit_reason = await work
    except TokenRefused as error:
        _limit_exit_time(EXIT_LOST)
        print_error(str(error))
        return EXIT_LOST
    except Exception as error:
        _limit_exit_time(EXIT_BAD_INPUT, error)
        raise
    code = EXIT_LOST if exit_reason is ExitReason.LOST else 0
    _limit_exit_time(code)
    return code


def _limit_exit_time(code: int, error: Exception | None = None) -> None:
    """Exit with `code` after EXIT_TIMEOUT_S, unless Python exits before.

    Python would wait forever for an inline handler that ignores its cancellation, for a thread of a handler, or for
    output that nothing reads. The worker has deregistered already, and its tasks are requeued.
    """

    def flush() -> None:
        standard_error.drain()
        if error is not None:
            print_error(str(error) or type(error).__name__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def exit_now() -> None:
        flushing = threading.Thread(target=flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_TIMEOUT_S)
        os._exit(code)

    # A daemon thread does not delay a normal exit.
    timer = threading.Timer(EXIT_TIMEOUT_S, exit_now)
    timer.daemon = True
    timer.start()
