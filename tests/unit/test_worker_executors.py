"""The three ways to run a handler, without a database: every attempt gives an outcome, or ends when cancelled."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from windlass.model.errors import HandlerNotFound
from windlass.model.task import Claim
from windlass.worker import process
from windlass.worker.command import CommandExecutor
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Executor, Outcome
from windlass.worker.handler import DoNotRetry, RunningTask
from windlass.worker.inline import InlineExecutor
from windlass.worker.isolated import IsolatedExecutor

HANDLERS = Path(__file__).parent.parent / "e2e"
TIMEOUT_S = 20.0


async def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        await asyncio.sleep(0.01)


def claim(payload: Any = None, timeout_s: float | None = None) -> Claim:
    return Claim(1, uuid4(), "q", json.dumps(payload), 1, 3, timeout_s, 0, datetime.now(UTC))


async def run(executor: Executor, payload: Any = None, timeout_s: float | None = None) -> Outcome:
    return await asyncio.wait_for(executor.run(claim(payload, timeout_s), lambda *_: None), TIMEOUT_S)


def failure(outcome: Outcome) -> AttemptFailure:
    assert isinstance(outcome, AttemptFailure), outcome
    return outcome


# ------------------------------------------------------------------------------------------------------- isolated


@pytest.fixture
async def isolated(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IsolatedExecutor]:
    monkeypatch.chdir(HANDLERS)
    executor = IsolatedExecutor("handlers:misbehave")
    await executor.start()
    yield executor
    await executor.close()
    assert live_children() == []


def live_children() -> list[psutil.Process]:
    """Without the servers that other tests of this session have started."""
    return [p for p in psutil.Process().children(recursive=True) if not is_gone_or_shared(p)]


def is_gone_or_shared(child: psutil.Process) -> bool:
    try:
        is_shared = child.name() in ("postgres", "pgbouncer") or "support.forked_programs" in child.cmdline()
        return is_shared or child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def child_pid(executor: IsolatedExecutor) -> int:
    (pid,) = executor.child_pids
    return pid


async def test_cancelled_attempt_is_killed_and_next_gets_new_process(
    isolated: IsolatedExecutor, tmp_path: Path
) -> None:
    pid = child_pid(isolated)
    file = tmp_path / "pid"
    attempt = asyncio.create_task(run(isolated, {"how": "hang with another group", "file": str(file)}))
    await wait_until(file.exists, "the handler runs")
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert live_children() == []
    assert await run(isolated, {"how": "nothing"}) == AttemptSuccess('{"how":"nothing"}')
    assert child_pid(isolated) != pid


async def test_attempt_can_be_cancelled_while_its_process_starts(isolated: IsolatedExecutor) -> None:
    failure(await run(isolated, {"how": "os._exit"}))
    attempt = asyncio.create_task(run(isolated, {"how": "nothing"}))
    await wait_until(live_children, "a new process starts")
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert live_children() == []
    assert await run(isolated, {"how": "nothing"}) == AttemptSuccess('{"how":"nothing"}')


async def test_child_that_died_or_flooded_while_idle_fails_no_attempt(
    isolated: IsolatedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        os.kill(child_pid(isolated), signal.SIGKILL)
        await wait_until(lambda: not isolated.child_pids, "the death is noticed")
        assert await run(isolated, {"how": "nothing"}) == AttemptSuccess('{"how":"nothing"}')
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 1 << 20)
    assert await run(isolated, {"how": "flood after the end"}) == AttemptSuccess('"done"')
    await wait_until(lambda: not isolated.child_pids, "the output limit")
    assert await run(isolated, {"how": "nothing"}) == AttemptSuccess('{"how":"nothing"}')


UNPARSABLE_PAYLOADS = pytest.mark.parametrize(
    ("payload", "message"),
    [("1" * 5_001, "Exceeds the limit"), ("[" * 6_000 + "]" * 6_000, "nested more than 900 levels deep")],
    ids=["a number of 5,001 digits", "6,000 nested arrays"],
)


@UNPARSABLE_PAYLOADS
async def test_unparsable_payload_fails_task_but_keeps_child(
    isolated: IsolatedExecutor, payload: str, message: str
) -> None:
    pid = child_pid(isolated)
    attempt = isolated.run(replace(claim(), payload=payload), lambda *_: None)
    found = failure(await asyncio.wait_for(attempt, TIMEOUT_S))
    assert (found.code, found.retry) == ("BAD_PAYLOAD", False)
    assert message in found.error
    assert await run(isolated, {"how": "nothing"}) == AttemptSuccess('{"how":"nothing"}')
    assert child_pid(isolated) == pid


async def test_answer_before_death_of_child_counts(isolated: IsolatedExecutor) -> None:
    for _ in range(3):
        assert await run(isolated, {"how": "die after the answer"}) == AttemptSuccess('"answered"')
        await wait_until(lambda: not isolated.child_pids, "the death is noticed")


async def test_timeout_during_death_of_child_leaves_no_guard(
    isolated: IsolatedExecutor,
) -> None:
    # Around the time that dying and describing it takes.
    for limit_s in (0.001, 0.005, 0.01, 0.02, 0.05):
        code = failure(await run(isolated, {"how": "os._exit"}, timeout_s=limit_s)).code
        assert code in ("TIMEOUT", "CHILD_DIED")
        assert live_children() == []


async def test_child_that_cannot_be_started_raises_handler_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    executor = IsolatedExecutor("handlers:misbehave")
    fds = psutil.Process().num_fds()
    with pytest.raises(HandlerNotFound, match="cannot start a process for handlers:misbehave"):
        await executor.start()
    assert psutil.Process().num_fds() == fds


async def test_failed_start_of_many_children_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # One fails at once while the others are still starting.
    first = tmp_path / "first"
    first.touch()
    (tmp_path / "fails_once.py").write_text(
        f"import pathlib, time\ntry:\n    pathlib.Path({str(first)!r}).unlink()\nexcept FileNotFoundError:\n"
        "    time.sleep(600)\nraise ValueError('the cause')\n"
    )
    monkeypatch.chdir(tmp_path)
    executor = IsolatedExecutor("fails_once:handler", concurrency=4)
    with pytest.raises(HandlerNotFound, match="cannot import handler fails_once:handler: ValueError: the cause"):
        await executor.start()
    assert live_children() == []
    await executor.close()
    assert capfd.readouterr().err == ""


async def test_concurrent_attempts_have_separate_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HANDLERS)
    executor = IsolatedExecutor("handlers:who", concurrency=3)
    await executor.start()
    try:
        outcomes = await asyncio.gather(*(run(executor) for _ in range(3)))
        pids = {json.loads(outcome.result or "")["pid"] for outcome in outcomes if isinstance(outcome, AttemptSuccess)}
        assert len(pids) == 3
    finally:
        await executor.close()


# -------------------------------------------------------------------------------------------------------- command


async def command(text: str, payload: Any = None, timeout_s: float | None = None, **options: int) -> Outcome:
    executor = CommandExecutor(text, **options)
    await executor.start()
    outcome = await run(executor, payload, timeout_s)
    await executor.close()
    assert live_children() == []
    return outcome


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("cat", '{"a":"Grüße"}'),
        ("true", "null"),
        ("sh -c 'echo; echo [1, 2]; echo'", "[1,2]"),
        ("""sh -c 'echo "[$WINDLASS_TASK_ID, $WINDLASS_ATTEMPT, \\"$WINDLASS_QUEUE\\"]"'""", '[1,1,"q"]'),
        ("sh -c 'echo noise >&2; echo 1'", "1"),
        ("sh -c 'sleep 600 & echo 1'", "1"),
        ("sh -c 'exec 0<&-; echo 1'", "1"),
    ],
    ids=["JSON in and out", "no output", "white space", "environment", "stderr", "background process", "closed stdin"],
)
async def test_command_with_exit_code_0_returns_its_output(text: str, result: str) -> None:
    assert await command(text, {"a": "Grüße"}) == AttemptSuccess(result)


async def test_command_without_execute_permission_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "e.sh"
    script.write_text("#!/bin/sh\ncat\n")
    with pytest.raises(HandlerNotFound, match=f"'{script}' is not executable. Run `chmod \\+x {script}`"):
        await command(str(script))
    script.chmod(0o755)
    assert await command(str(script), 1) == AttemptSuccess("1")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("sh -c 'echo the cause >&2; exit 3'", "HANDLER_ERROR", "the command exited with code 3: the cause"),
        ("false", "HANDLER_ERROR", "the command exited with code 1"),
        ("sh -c 'kill -SEGV $$'", "HANDLER_ERROR", "the command was killed by SIGSEGV"),
        ("echo hello", "BAD_RESULT", "the command's output is not JSON"),
        (r"""printf '{"name":"M\374ller"}'""", "BAD_RESULT", 'output is not UTF-8 (byte 10): {"name":"M'),
        ("echo NaN", "BAD_RESULT", "the command's result cannot be written as JSON"),
        (r"""printf '"\\u0000"'""", "BAD_RESULT", "contains a NUL character"),
        ("cat /dev/zero", "BAD_RESULT", "the result has more than 1,048,576 bytes"),
        ("python3 -c \"print('[' * 100000)\"", "BAD_RESULT", "the command's output is not JSON"),
        ("sh -c 'cat /dev/zero >&2'", "OUTPUT_LIMIT", "the attempt printed more than 1 MiB"),
        ("sh -c 'sleep 600 & sleep 600'", "TIMEOUT", "exceeded its time limit of 0.3 s"),
        (
            'python3 -c "import time; x = bytes(1) * (200 << 20); time.sleep(600)"',
            "MEMORY_LIMIT",
            "MiB of memory; the limit is 100 MiB",
        ),
    ],
)
async def test_failed_command_has_code_and_message(
    monkeypatch: pytest.MonkeyPatch, text: str, code: str, message: str
) -> None:
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 1 << 20)
    monkeypatch.setattr(process, "MEMORY_CHECK_INTERVAL_S", 0.1)
    limit_s = 0.3 if code == "TIMEOUT" else None
    outcome = failure(await command(text, timeout_s=limit_s, memory_limit_bytes=100 << 20))
    assert outcome.code == code
    assert message in outcome.error


async def test_command_need_not_read_large_payload() -> None:
    assert await command("sh -c 'echo 1'", "x" * 1_000_000) == AttemptSuccess("1")
    assert failure(await command("sh -c 'exit 2'", "x" * 1_000_000)).error == "the command exited with code 2"


async def test_cancelled_command_is_killed_with_descendants() -> None:
    executor = CommandExecutor("sh -c 'sleep 600 & setsid sleep 600 & wait'")
    await executor.start()
    attempt = asyncio.create_task(run(executor))
    await wait_until(lambda: len(live_children()) >= 4, "the command, its guard and two more run")
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert live_children() == []


# --------------------------------------------------------------------------------------------------------- inline


async def inline(handler: Callable[[RunningTask], Any], timeout_s: float | None = None) -> Outcome:
    executor = InlineExecutor(handler)
    await executor.start()
    return await run(executor, timeout_s=timeout_s)


async def _succeeds(task: RunningTask) -> Any:
    task.progress(0.5)
    return task.id


async def _raises(_task: RunningTask) -> None:
    raise ValueError("the cause")


async def _raises_timeout(_task: RunningTask) -> None:
    raise TimeoutError("its own")


async def _exits(_task: RunningTask) -> None:
    sys.exit(3)


async def _interrupts(_task: RunningTask) -> None:
    raise KeyboardInterrupt


async def _raises_do_not_retry(_task: RunningTask) -> None:
    raise DoNotRetry


async def _raises_memory_error(_task: RunningTask) -> None:
    raise MemoryError


async def _awaits_something_cancelled(_task: RunningTask) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def _returns_nan(_task: RunningTask) -> float:
    return float("nan")


async def _sleeps(_task: RunningTask) -> None:
    await asyncio.sleep(600)


INLINE_FAILURES = [
    (_raises, "HANDLER_ERROR", "ValueError: the cause"),
    (_raises_memory_error, "OUT_OF_MEMORY", "MemoryError"),
    (_raises_timeout, "HANDLER_ERROR", "TimeoutError: its own"),
    (_exits, "HANDLER_ERROR", "the handler called sys.exit(3)"),
    (_interrupts, "HANDLER_ERROR", "KeyboardInterrupt"),
    (_raises_do_not_retry, "DO_NOT_RETRY", "the handler raised DoNotRetry"),
    (_awaits_something_cancelled, "HANDLER_ERROR", "CancelledError"),
    (_returns_nan, "BAD_RESULT", "cannot be written as JSON"),
]


@pytest.mark.parametrize(
    ("handler", "code", "message", "timeout_s"),
    [
        *((*case, timeout_s) for case in INLINE_FAILURES for timeout_s in (TIMEOUT_S, None)),
        (_sleeps, "TIMEOUT", "exceeded its time limit of 0.2 s", 0.2),
    ],
)
async def test_failed_inline_handler_has_code_and_message(
    handler: Callable[[RunningTask], Any], code: str, message: str, timeout_s: float | None
) -> None:
    outcome = failure(await inline(handler, timeout_s))
    assert outcome.code == code
    assert message in outcome.error
    assert outcome.retry == (code != "DO_NOT_RETRY")


@UNPARSABLE_PAYLOADS
async def test_unparsable_payload_fails_task_inline(payload: str, message: str) -> None:
    executor = InlineExecutor(_succeeds)
    await executor.start()
    found = failure(await executor.run(replace(claim(), payload=payload), lambda *_: None))
    assert (found.code, found.retry) == ("BAD_PAYLOAD", False)
    assert message in found.error


async def test_inline_handler_returns_its_result() -> None:
    assert await inline(_succeeds) == AttemptSuccess("1")
    assert await inline(_succeeds, timeout_s=5) == AttemptSuccess("1")


@pytest.mark.parametrize("timeout_s", [5, None])
async def test_cancelled_inline_handler_ends(timeout_s: float | None) -> None:
    attempt = asyncio.create_task(inline(_sleeps, timeout_s))
    await asyncio.sleep(0)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt


async def test_sync_handler_is_refused_inline() -> None:
    with pytest.raises(HandlerNotFound, match="is not an async function, which --inline requires"):
        await InlineExecutor(lambda task: task).start()
