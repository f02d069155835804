"""Handlers that are commands: JSON in on standard input, JSON out on standard output, one process an attempt.
Both in UTF-8; other output is refused, not guessed at.

Exit code 0 means success; empty output is a null result. Any other code is a failure whose message is the end of
standard error. WINDLASS_TASK_ID, WINDLASS_QUEUE, WINDLASS_ATTEMPT and WINDLASS_CLAIM_TOKEN stand in the environment.
The attempt ends with the command: what it left running in the background is ended too.
"""

import asyncio
import json
import os
import shlex
import shutil
from pathlib import Path

from windlass.model.errors import BadInput, HandlerNotFound
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, to_json
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome, time_limit_failure
from windlass.worker.handler import ReportProgress
from windlass.worker.process import ProcessGroup, describe_exit, start_group


class CommandExecutor:
    def __init__(
        self, command: str, *, memory_limit_bytes: int | None = None, max_result_bytes: int = MAX_PAYLOAD_BYTES
    ) -> None:
        """`memory_limit_bytes` is for each attempt's process with everything it started."""
        self._command = command
        self._arguments: list[str] = []
        self._memory_limit_bytes = memory_limit_bytes
        self._max_result_bytes = max_result_bytes

    async def start(self) -> None:
        try:
            self._arguments = shlex.split(self._command)
        except ValueError as error:
            raise HandlerNotFound(f"cannot read the command {self._command!r} ({error}): check its quotes.") from None
        if not self._arguments or shutil.which(self._arguments[0]) is None:
            raise HandlerNotFound(_why_not_found(self._arguments[0] if self._arguments else ""))

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:  # noqa: ARG002 - a command has no way to report
        try:
            group = await start_group(
                self._arguments,
                env=_environment(claim),
                memory_limit_bytes=self._memory_limit_bytes,
                max_answer_bytes=self._max_result_bytes,
            )
        except OSError as error:
            raise HandlerNotFound(
                f"cannot run the command {self._arguments[0]!r} ({error.strerror}): check that it can be executed."
            ) from None
        try:
            group.write_all(claim.payload.encode())
            async with asyncio.timeout(claim.timeout_s):
                returncode = await group.wait()
        except TimeoutError:
            return time_limit_failure(claim.timeout_s or 0)
        finally:
            await group.end()
        return group.breach or self._outcome(group, returncode)

    async def close(self) -> None:
        pass

    def _outcome(self, group: ProcessGroup, returncode: int) -> Outcome:
        if returncode != 0:
            return AttemptFailure(
                "HANDLER_ERROR", f"the command {describe_exit(returncode)}: {group.tail()}".rstrip(": ")
            )
        try:
            text = group.answer.decode().strip()
        except UnicodeDecodeError as error:
            shown = group.answer[:200].decode(errors="replace")
            return AttemptFailure(
                "BAD_RESULT", f"the command's output is not UTF-8, as JSON is (byte {error.start:,}): {shown}"
            )
        try:
            return AttemptSuccess(
                to_json(json.loads(text) if text else None, "the command's result", self._max_result_bytes)
            )
        except BadInput as error:
            return AttemptFailure("BAD_RESULT", str(error))
        except (ValueError, RecursionError) as error:
            return AttemptFailure("BAD_RESULT", f"the command's output is not JSON ({error}): {text[:200]}")


def _why_not_found(name: str) -> str:
    if "/" in name and Path(name).is_file():
        return f"the command {name!r} is not executable: run `chmod +x {shlex.quote(name)}`."
    return f"cannot find the command {name!r}: check the name and the PATH."


def _environment(claim: Claim) -> dict[str, str]:
    return {
        **os.environ,
        "WINDLASS_TASK_ID": str(claim.task_id),
        "WINDLASS_QUEUE": claim.queue,
        "WINDLASS_ATTEMPT": str(claim.attempt),
        "WINDLASS_CLAIM_TOKEN": str(claim.token),
    }
