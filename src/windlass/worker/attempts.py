"""Runs claimed tasks and puts their outcomes into the outbox.

Every claim that begins here ends in the outbox as a result, a failure or a release.

Attempts are run by runners, event-loop tasks that take ready attempts one after another. Before a runner starts an
attempt while more are ready, it spawns a spare runner. If the attempt does not wait, the runner continues with the
next one; if it waits, the spare runner takes over. So all ready attempts run concurrently, but hundreds of short
attempts do not cost an event-loop task each.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from uuid import UUID

from windlass.model.errors import HandlerNotFound
from windlass.model.task import Claim
from windlass.worker.delivery import NOT_FINISHED, HeldAttempt, Outbox
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Executor, NotBegun
from windlass.worker.handler import format_exception
from windlass.worker.output_buffer import OutputBuffer

# How long cancelled attempts may take to end. An inline handler that ignores its cancellation is not waited for again.
CANCEL_TIMEOUT_S = 15.0


class Attempts:
    def __init__(
        self,
        executor: Executor,
        outbox: Outbox,
        *,
        default_timeout_s: float | None,
        output: OutputBuffer | None = None,
        on_progress: Callable[[], None],
        on_end: Callable[[], None],
        on_handler_lost: Callable[[HandlerNotFound], None],
    ) -> None:
        """`output` keeps the attempts' output apart.

        `on_end` is called after each attempt; `on_handler_lost` when the handler can no longer be started.
        """
        self._executor = executor
        self._outbox = outbox
        self._output = output
        self._default_timeout_s = default_timeout_s
        self._on_progress = on_progress
        self._on_end = on_end
        self._on_handler_lost = on_handler_lost
        # Attempts that have not ended, with their runner; None for those that wait in `_ready`.
        self._running: dict[UUID, asyncio.Task[None] | None] = {}
        self._ready: deque[HeldAttempt] = deque()
        # References that keep the tasks from being garbage-collected.
        self._runners: set[asyncio.Task[None]] = set()
        self._has_spare_runner = False
        # Runners that did not end when they were cancelled.
        self._uncancellable: set[asyncio.Task[None]] = set()
        self._idle_since = time.monotonic()

    @property
    def count(self) -> int:
        """Attempts that have not ended."""
        return len(self._running)

    @property
    def idle_s(self) -> float:
        return 0.0 if self._running else time.monotonic() - self._idle_since

    def begin(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim.timeout_s is None and self._default_timeout_s is not None:
                claim = replace(claim, timeout_s=self._default_timeout_s)  # noqa: PLW2901
            self._running[claim.token] = None
            self._ready.append(self._outbox.hold(claim))
        if claims:
            self._spawn_runner()

    def cancel(self, tokens: Iterable[UUID]) -> None:
        """End these attempts and release their claims. Ignores attempts that have ended."""
        for token in tokens:
            if token not in self._running:
                continue
            runner = self._running[token]
            if runner is not None:
                runner.cancel()
                continue
            held = self._outbox.attempt(token)
            self._ready.remove(held)
            del self._running[token]
            self._outbox.add_release(held.claim)
            self._on_end()

    async def cancel_all(self) -> None:
        """End all attempts, waiting at most CANCEL_TIMEOUT_S; their claims are then in the outbox."""
        self.cancel(list(self._running))
        if runners := {runner for runner in self._running.values() if runner is not None} - self._uncancellable:
            _, self._uncancellable = await asyncio.wait(runners, timeout=CANCEL_TIMEOUT_S)

    def _spawn_runner(self) -> None:
        self._has_spare_runner = True
        runner = asyncio.create_task(self._run_ready_attempts())
        self._runners.add(runner)
        runner.add_done_callback(self._runners.discard)

    async def _run_ready_attempts(self) -> None:
        runner = asyncio.current_task()
        self._has_spare_runner = False
        while self._ready:
            held = self._ready.popleft()
            if self._ready and not self._has_spare_runner:
                self._spawn_runner()
            self._running[held.claim.token] = runner
            await self._run(held)
            if runner is None or runner.cancelling():
                # The cancellation was meant for the last attempt and must not reach the next one.
                if self._ready and not self._has_spare_runner:
                    self._spawn_runner()
                return

    async def _run(self, held: HeldAttempt) -> None:
        claim = held.claim

        def report(fraction: float, note: str | None) -> None:
            held.progress, held.note = fraction, note
            self._on_progress()

        key = self._output.begin(claim) if self._output is not None else None
        try:
            outcome = await self._executor.run(claim, report)
            if isinstance(outcome, AttemptSuccess):
                self._outbox.add_result(claim, outcome.result)
            else:
                self._outbox.add_failure(claim, outcome)
        except asyncio.CancelledError:
            self._outbox.add_release(claim)
        except NotBegun as error:
            self._outbox.add_release(claim, str(error) or NOT_FINISHED, error.delay_s)
        except HandlerNotFound as error:
            self._outbox.add_release(claim)
            self._on_handler_lost(error)
        except Exception as error:
            # A defect of the worker, not of the handler. The claim must still end, or heartbeats would keep it forever.
            self._outbox.add_failure(claim, AttemptFailure("WORKER_ERROR", format_exception(error)))
        if self._output is not None and key is not None:
            self._output.end(key)
        del self._running[claim.token]
        self._idle_since = time.monotonic()
        self._on_end()
