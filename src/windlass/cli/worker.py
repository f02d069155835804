"""`windlass worker`: claim tasks and run a handler for each."""

import contextlib
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass import __version__
from windlass.cli.common import EXIT_BAD_INPUT, ConfigFile, DataDir, command, load, say
from windlass.cli.logs import LogFormat, configure_logs, hide
from windlass.cli.worker_env import SpawnedWorkerEnv
from windlass.model.auth import API_PREFIX, is_token
from windlass.model.errors import BadInput, TokenRefused
from windlass.model.urls import problem_of_control_plane_url
from windlass.model.worker import MAX_CONCURRENCY
from windlass.worker.nonblocking_stderr import standard_error

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from windlass.model.config import WorkerConfig
    from windlass.worker.lifecycle import ExitReason, WorkerSettings

EXIT_LOST = 3
# From a worker's end to that of its process, for what its handlers left behind.
END_TIMEOUT_S = 5.0
# For the log and the reason of the end, where somebody reads them.
LAST_WORDS_TIMEOUT_S = 3.0
# No token of ours is longer.
MAX_TOKEN_FILE_CHARACTERS = 1_000


@command
async def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", "-q", help="Queue to serve; several times for several.", metavar="NAME"),
    ] = None,
    handler: Annotated[
        str | None, typer.Option(help="Python function that takes the task.", metavar="PACKAGE.MODULE:FUNCTION")
    ] = None,
    exec_: Annotated[
        str | None,
        typer.Option("--exec", help="Command to run per task: JSON on stdin, JSON on stdout.", metavar="COMMAND"),
    ] = None,
    inline: Annotated[
        bool, typer.Option("--inline", help="Run an async handler in the worker's own loop: fast, but unprotected.")
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", min=1, max=MAX_CONCURRENCY, help="Tasks at the same time (default 1).", metavar="N"
        ),
    ] = None,
    chdir: Annotated[
        Path | None, typer.Option(help="Work in this folder; handlers are imported from it.", metavar="FOLDER")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Time limit of tasks that bring none of their own.", metavar="SECONDS")
    ] = None,
    heartbeat_interval: Annotated[
        float | None, typer.Option(help="How often it says that it lives.", metavar="SECONDS")
    ] = None,
    lease: Annotated[
        float | None, typer.Option(help="Silent for longer than this, its tasks go to others.", metavar="SECONDS")
    ] = None,
    memory_limit_mb: Annotated[
        int | None, typer.Option(help="Memory one handler's process may use.", metavar="MB")
    ] = None,
    join: Annotated[
        Path | None,
        typer.Option(help="Join the control plane named in this file, and do what it says.", metavar="FILE"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Work over HTTP for the control plane there, with a token of role worker in WINDLASS_TOKEN.",
            metavar="https://HOST",
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token for --url instead.", metavar="FILE")
    ] = None,
    log_format: LogFormat = "auto",
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> int:
    """Claim tasks and run a handler for each.

    Goes on until it is told to stop. Ctrl-C or SIGTERM: it finishes what it has begun. Again,
    half a second later or more: it gives it back.
    """
    configure_logs(log_format)
    from windlass.config_loader import secrets_of
    from windlass.wiring.worker import run_joined_worker, run_self_registered_worker, run_worker

    if join is not None:
        given = (queue, handler, exec_, inline or None, concurrency, chdir, timeout, heartbeat_interval, lease)
        if any(value is not None for value in (*given, memory_limit_mb, url, token_file, config, data_dir)):
            raise BadInput("--join brings the work order along: leave out --queue, --handler and all that is in it.")
        return await _seen_through(run_joined_worker(join, __version__))
    if not queue:
        raise BadInput("a worker needs a queue to serve: give --queue, or --join a control plane.")
    _check_what_runs(handler, exec_, inline)
    if token_file is not None and url is None:
        raise BadInput("--token-file goes with --url: say where the control plane is.")
    api_token = _api_token(url, token_file) if url is not None else ""
    hiring = SpawnedWorkerEnv.from_environment()
    loaded = load(
        config,
        data_dir,
        has_fleets=False,
        **{
            "database_url": hiring.database_url,
            "worker.heartbeat_interval_s": heartbeat_interval,
            "worker.lease_s": lease,
            "worker.timeout_s": timeout,
            "worker.memory_limit_mb": memory_limit_mb,
        },
    )
    hide({*secrets_of(loaded.config), api_token})
    if chdir is not None:
        _change_directory(chdir)
    settings = _settings(loaded.config.worker, queue, concurrency, hiring)
    run = partial(run_worker, loaded.config, settings)
    if url is not None:
        run = partial(run_self_registered_worker, loaded.config, settings, url.rstrip("/"), api_token)
    return await _seen_through(run(handler=handler, command=exec_, is_inline=inline))


def _check_what_runs(handler: str | None, command: str | None, is_inline: bool) -> None:
    if (handler is None) == (command is None):
        raise BadInput("a worker needs exactly one of --handler and --exec: say what to run.")
    if is_inline and handler is None:
        raise BadInput("--inline goes with --handler: a command cannot run inside the worker.")


def _api_token(url: str, file: Path | None) -> str:
    """The token for --url. It is taken out of the environment: handlers have no use for it."""
    problem = problem_of_control_plane_url(url.rstrip("/"))
    if problem is not None:
        raise BadInput(f"--url {problem}.")
    token = os.environ.pop("WINDLASS_TOKEN", "")
    if file is not None:
        try:
            token = file.read_text()[:MAX_TOKEN_FILE_CHARACTERS]
        except (OSError, UnicodeDecodeError) as error:
            why = type(error).__name__
            raise BadInput(f"the token in {file} cannot be read ({why}): check --token-file.") from None
    if not is_token(token.strip(), API_PREFIX):
        where = f"in {file}" if file is not None else "in WINDLASS_TOKEN"
        raise BadInput(
            f"there is no token {where}: `windlass tokens create NAME --role worker` makes one that begins with "
            f"{API_PREFIX}."
        )
    return token.strip()


def _settings(
    chosen: "WorkerConfig", queues: list[str], concurrency: int | None, hiring: SpawnedWorkerEnv
) -> "WorkerSettings":
    from windlass.model.task import check_queue_name
    from windlass.worker.lifecycle import WorkerSettings

    return WorkerSettings(
        queues=tuple(check_queue_name(name) for name in dict.fromkeys(queues)),
        fleet=hiring.fleet,
        worker_id=hiring.worker_id,
        concurrency=concurrency or 1,
        heartbeat_interval_s=chosen.heartbeat_interval_s,
        lease_s=chosen.lease_s,
        timeout_s=chosen.timeout_s,
        drain_timeout_s=chosen.drain_timeout_s,
        version=__version__,
        needs_gpu=hiring.needs_gpu,
    )


async def _seen_through(work: "Awaitable[ExitReason]") -> int:
    """Until the worker has left: its exit code, and an end of its process that nothing can hold up."""
    from windlass.worker.lifecycle import ExitReason

    try:
        exit_reason = await work
    except TokenRefused as error:
        code = _end_for_sure(EXIT_LOST)
        say(str(error))
        return code
    except Exception as error:
        _end_for_sure(EXIT_BAD_INPUT, error)
        raise
    return _end_for_sure(EXIT_LOST if exit_reason is ExitReason.LOST else 0)


def _end_for_sure(code: int, error: Exception | None = None) -> int:
    """The worker has left and its tasks are given back. See to it that its process ends too.

    An inline handler that ignores its cancellation, or left work in a thread, would keep Python waiting for ever. So
    would last words that nobody reads.
    """

    def say_last_words() -> None:
        standard_error.drain()
        if error is not None:
            say(str(error) or type(error).__name__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def end() -> None:
        last_words = threading.Thread(target=say_last_words, daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_TIMEOUT_S)
        os._exit(code)

    # A daemon: where nothing holds Python up, it ends before the time is over, and the timer with it.
    timer = threading.Timer(END_TIMEOUT_S, end)
    timer.daemon = True
    timer.start()
    return code


def _change_directory(folder: Path) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadInput(f"cannot work in {folder} ({error.strerror}): check --chdir.") from None
