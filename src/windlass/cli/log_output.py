"""Prints the output of workers and tasks, for `windlass workers logs` and `windlass tasks logs`."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import typer

from windlass.cli.output import printable, to_plain
from windlass.model.redaction import Mask
from windlass.model.worker_log import MAX_LINES_READ, WorkerLogLine

NO_OUTPUT_HINT = "It printed nothing, its output was deleted (`retention.worker_logs_s`), or `logs.send_output` is off."
LogTail = Annotated[
    int,
    typer.Option(
        "--tail", "--lines", "-n", min=1, max=MAX_LINES_READ, help="Number of lines, from the end.", metavar="N"
    ),
]
Timestamps = Annotated[
    bool, typer.Option("--timestamps", "-t", help="Print the time and the attempt of each line, where they are known.")
]


async def print_log_lines(
    lines: AsyncIterator[WorkerLogLine], mask: Mask, *, has_timestamps: bool, as_json: bool, is_flushed: bool
) -> int:
    """Returns the number of lines. With `as_json` one object per line."""
    count = 0
    async for line in lines:
        count += 1
        text = mask(line.text)
        if as_json:
            print(json.dumps({**to_plain(line), "text": text}, ensure_ascii=False), flush=is_flushed)
            continue
        print(f"{_prefix(line) if has_timestamps else ''}{printable(text)}", flush=is_flushed)
    return count


def _prefix(line: WorkerLogLine) -> str:
    at = f"{line.at:%Y-%m-%d %H:%M:%S}" if line.at is not None else ""
    if line.task_id is None:
        return f"{at}  {'boot  ' if line.source == 'boot' else ''}"
    return f"{at}  task {line.task_id} attempt {line.attempt}  "


def print_note(text: str) -> None:
    """On standard error, so that standard output has output only."""
    print(text, file=sys.stderr)


def diagnostics_lines(diagnostics: Mapping[str, Any]) -> list[str]:
    """What was known about a worker at its end, for people. Code and reason are in its row."""
    lines = []
    if machine := diagnostics.get("machine"):
        note = f" ({machine['note']})" if machine.get("note") else ""
        lines.append(f"machine at the end: {machine['state']}{note}")
    if ended := diagnostics.get("exit"):
        parts = {"code": "exit code", "signal": "killed by", "status": "vendor status"}
        lines.append("ended: " + ", ".join(f"{words} {ended[name]}" for name, words in parts.items() if name in ended))
    if error := diagnostics.get("last_error"):
        code = error.get("code", "unknown")
        lines.append(f"last failed attempt: {code}, task {error.get('task_id')} attempt {error.get('attempt')}")
    if heartbeat := diagnostics.get("last_heartbeat"):
        lines.append(f"last heartbeat: {heartbeat}")
    if vitals := diagnostics.get("vitals"):
        lines.append("last vitals: " + ", ".join(f"{name} {value}" for name, value in vitals.items()))
    if preparation := diagnostics.get("preparation"):
        lines.append(f"preparation: {preparation['code']}: {preparation['output']}")
    lines += [f"boot step: {step['step']}" for step in diagnostics.get("boot", {}).get("steps", [])]
    if dropped := diagnostics.get("dropped_lines"):
        lines.append(f"dropped output: {dropped:,} lines")
    if last := diagnostics.get("last_lines"):
        lines += ["last output:", *(f"  {line}" for line in last)]
    return lines
