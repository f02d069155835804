"""Handlers that are commands: JSON in on standard input, JSON out on standard output, one process an attempt.

Exit code 0 means success; empty output is a null result. Any other code is a failure whose message is the end of
standard error. WINDLASS_TASK_ID, WINDLASS_QUEUE, WINDLASS_ATTEMPT and WINDLASS_CLAIM_TOKEN stand in the environment.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from uuid import UUID

from windlass.model.errors import BadInput, HandlerNotFound
from windlass.model.task import MAX_PAYLOAD_BYTES, Claim, to_json
from windlass.worker.executor import Abandoned, Failure, Outcome, ReportProgress, Success, time_limit_failure
from windlass.worker.process import MAX_OUTPUT_BYTES, Group, describe_exit, start_group


class CommandExecutor:
    def __init__(self, command: str, *, max_result_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._command = command
        self._arguments: list[str] = []
        self._max_result_bytes = max_result_bytes
        self._groups: dict[UUID, Group] = {}
        self._verdicts: dict[UUID, Outcome] = {}

    async def start(self) -> None:
        try:
            self._arguments = shlex.split(self._command)
        except ValueError as error:
            raise HandlerNotFound(f"cannot read the command {self._command!r} ({error}): check its quotes.") from None
        if not self._arguments or shutil.which(self._arguments[0]) is None:
            name = self._arguments[0] if self._arguments else ""
            raise HandlerNotFound(f"cannot find the command {name!r}: check the name and the PATH.")

    async def run(self, claim: Claim, report: ReportProgress) -> Outcome:  # noqa: ARG002 - a command has no way to report
        group = await start_group(self._arguments, env=_environment(claim), is_piped=True)
        self._groups[claim.token] = group
        try:
            async with asyncio.timeout(claim.timeout_s):
                outcome = await self._converse(group, claim)
        except TimeoutError:
            outcome = time_limit_failure(claim.timeout_s or 0)
        finally:
            del self._groups[claim.token]
            await group.end()
        return self._verdicts.pop(claim.token, outcome)

    def abort(self, token: UUID, reason: str) -> None:
        self._end_attempt(token, Abandoned(reason))

    async def close(self) -> None:
        for token in list(self._groups):
            self._end_attempt(token, Abandoned("the worker closed"))

    def _end_attempt(self, token: UUID, verdict: Outcome) -> None:
        if token in self._groups:
            self._verdicts.setdefault(token, verdict)
            self._groups[token].kill()

    async def _converse(self, group: Group, claim: Claim) -> Outcome:
        flood = Failure("OUTPUT_LIMIT", f"the command printed more than {MAX_OUTPUT_BYTES >> 20} MiB in one attempt")
        group.relay_output(group.stderr, lambda: self._end_attempt(claim.token, flood))
        writing = asyncio.create_task(_write(group.stdin, claim.payload.encode()))
        # One byte more than may be: enough to know that it is too much.
        output = await _read_at_most(group.stdout, self._max_result_bytes + 1)
        if len(output) > self._max_result_bytes:
            return Failure("BAD_RESULT", f"the command's result has more than {self._max_result_bytes:,} bytes")
        returncode = await group.wait()
        writing.cancel()
        if returncode != 0:
            return Failure("HANDLER_ERROR", f"the command {describe_exit(returncode)}: {group.tail()}".rstrip(": "))
        return self._result(output)

    def _result(self, output: bytes) -> Outcome:
        text = output.decode(errors="replace").strip()
        try:
            return Success(to_json(json.loads(text) if text else None, "the command's result", self._max_result_bytes))
        except BadInput as error:
            return Failure("BAD_RESULT", str(error))
        except ValueError as error:
            return Failure("BAD_RESULT", f"the command's output is not JSON ({error}): {text[:200]}")


async def _write(stdin: asyncio.StreamWriter, data: bytes) -> None:
    # A command need not read its input.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(data)
        await stdin.drain()
    stdin.close()


async def _read_at_most(stream: asyncio.StreamReader, limit: int) -> bytes:
    received = bytearray()
    while len(received) < limit and (chunk := await stream.read(limit - len(received))):
        received += chunk
    return bytes(received)


def _environment(claim: Claim) -> dict[str, str]:
    return {
        **os.environ,
        "WINDLASS_TASK_ID": str(claim.task_id),
        "WINDLASS_QUEUE": claim.queue,
        "WINDLASS_ATTEMPT": str(claim.attempt),
        "WINDLASS_CLAIM_TOKEN": str(claim.token),
    }
