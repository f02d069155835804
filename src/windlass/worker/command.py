"""Runs a command per attempt: the payload on standard input, the result on standard output, both JSON in UTF-8.

Exit code 0 means success, and empty output a null result. Any other code fails the attempt with the end of standard
error as the message. The environment has WINDLASS_TASK_ID, WINDLASS_QUEUE, WINDLASS_ATTEMPT and WINDLASS_CLAIM_TOKEN.
Background processes that the command leaves are killed when it exits.
"""

import asyncio
import json
import os
import shlex
import shutil

from windlass.model.error_text import LAST_OUTPUT, MAX_HEADLINE_CHARACTERS, raised_line
from windlass.model.errors import BadInput, HandlerNotFound
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, to_json
from windlass.model.worker_log import AttemptKey
from windlass.worker.crash_report import read_crash
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome, timeout_failure
from windlass.worker.handler import ReportProgress
from windlass.worker.handler_user import HandlerUser
from windlass.worker.process import ProcessGroup, describe_exit, start_group


class CommandExecutor:
    def __init__(
        self,
        command: str,
        *,
        memory_limit_bytes: int | None = None,
        max_result_bytes: int = MAX_PAYLOAD_BYTES,
        run_as: HandlerUser | None = None,
    ) -> None:
        """`memory_limit_bytes` applies to each attempt's process together with its descendants."""
        self._command = command
        self._arguments: list[str] = []
        self._memory_limit_bytes = memory_limit_bytes
        self._max_result_bytes = max_result_bytes
        self._run_as = run_as

    async def start(self) -> None:
        try:
            self._arguments = shlex.split(self._command)
        except ValueError as error:
            raise HandlerNotFound(f"cannot parse the command {self._command!r}: {error}. Check its quotes.") from None
        if not self._arguments or shutil.which(self._arguments[0]) is None:
            name = self._arguments[0] if self._arguments else ""
            if "/" in name and os.path.isfile(name):  # noqa: ASYNC240, PTH113 - once, before any attempt
                raise HandlerNotFound(f"the command {name!r} is not executable. Run `chmod +x {shlex.quote(name)}`.")
            raise HandlerNotFound(f"cannot find the command {name!r}. Check the name and the PATH.")

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:  # noqa: ARG002 - a command cannot report
        try:
            group = await start_group(
                self._arguments,
                env={
                    **os.environ,
                    "WINDLASS_TASK_ID": str(claim.task_id),
                    "WINDLASS_QUEUE": claim.queue,
                    "WINDLASS_ATTEMPT": str(claim.attempt),
                    "WINDLASS_CLAIM_TOKEN": str(claim.token),
                },
                memory_limit_bytes=self._memory_limit_bytes,
                max_answer_bytes=self._max_result_bytes,
                run_as=self._run_as,
            )
        except OSError as error:
            raise HandlerNotFound(
                f"cannot run the command {self._arguments[0]!r}: {error.strerror}. Check that it can be executed."
            ) from None
        group.begin_attempt(AttemptKey(claim.task_id, claim.attempt))
        try:
            group.write_all(claim.payload.encode())
            async with asyncio.timeout(claim.timeout_s):
                returncode = await group.wait()
        except TimeoutError:
            return timeout_failure(claim.timeout_s or 0)
        finally:
            await group.end()
        return group.limit_failure or self._outcome(group, returncode)

    async def close(self) -> None:
        pass

    def _outcome(self, group: ProcessGroup, returncode: int) -> Outcome:
        if returncode != 0:
            return AttemptFailure("HANDLER_ERROR", _describe_failure(returncode, group.tail()))
        try:
            text = group.answer.decode().strip()
        except UnicodeDecodeError as error:
            shown = group.answer[:200].decode(errors="replace")
            return AttemptFailure("BAD_RESULT", f"the command's output is not UTF-8 (byte {error.start:,}): {shown}")
        try:
            return AttemptSuccess(
                to_json(json.loads(text) if text else None, "the command's result", self._max_result_bytes)
            )
        except BadInput as error:
            return AttemptFailure("BAD_RESULT", str(error))
        except (ValueError, RecursionError) as error:
            return AttemptFailure("BAD_RESULT", f"the command's output is not JSON ({error}): {text[:200]}")


def _describe_failure(returncode: int, output: str) -> str:
    """How it exited and why: the exception of a Python program, otherwise the last line, before the rest."""
    exited = f"the command {describe_exit(returncode)}"
    if "\n" not in output:
        return f"{exited}: {output}".rstrip(": ")
    crash = read_crash(output)
    if crash.place is not None:
        return f"{exited} in {crash.place}{LAST_OUTPUT}\n{crash.output}"
    cause = raised_line(output) or output.rpartition("\n")[2]
    return f"{exited}: {cause[:MAX_HEADLINE_CHARACTERS]}{LAST_OUTPUT}\n{crash.output}"
