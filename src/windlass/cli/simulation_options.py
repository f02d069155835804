"""Options that `windlass simulate` and `windlass tune` share, and what both check before they run.

A run may take minutes, so that nothing is refused after it.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from windlass.model.errors import BadInput
from windlass.simulator.runs import RunRequest, reason_not_simulated

# The longest billing period of a simulation, in seconds: a year.
MAX_BILLING_S = 366 * 86_400
# The longest boot: a week.
MAX_BOOT_S = 7 * 86_400.0

TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="CSV file: arrival_s,duration_s[,queue]; .gz works.", metavar="FILE")
]
Slots = Annotated[int | None, typer.Option("--slots", help="Tasks that a machine runs at once (1).", min=1, max=10_000)]
BootTime = Annotated[
    float | None, typer.Option("--boot", help="Seconds from request to ready (120).", min=0.0, max=MAX_BOOT_S)
]
BootSigma = Annotated[
    float | None,
    typer.Option("--boot-sigma", help="Spread of boot times: sigma of a lognormal (0).", min=0.0, max=3.0),
]
Interval = Annotated[float | None, typer.Option("--interval", help="Seconds between cycles (10).", min=0.05)]
MaxWorkers = Annotated[
    int | None, typer.Option("--max", help="Maximum number of machines (default: as many as tasks need).", min=1)
]
Billing = Annotated[
    str | None,
    typer.Option(
        "--billing", help="Billed by the started `second` (default) or `hour`, or a number of seconds.", metavar="UNIT"
    ),
]


def billing_unit_s(billing: str | None) -> int | None:
    if billing in (None, "second", "hour"):
        return {None: None, "second": 1, "hour": 3600}[billing]
    seconds = int(billing) if re.fullmatch(r"[0-9]{1,9}", billing) else 0
    if not 1 <= seconds <= MAX_BILLING_S:
        raise BadInput(f"--billing is {billing[:60]!r}: write second, hour, or a number of seconds.")
    return seconds


def check_finite(options: Mapping[str, float | None]) -> None:
    for name, value in options.items():
        if value is not None and not math.isfinite(value):
            raise BadInput(f"{name} is {value}: write a finite number.")


def check_limits(min_workers: int | None, max_workers: int | None) -> None:
    if min_workers is not None and max_workers is not None and min_workers > max_workers:
        raise BadInput(f"--min is {min_workers} and --max is {max_workers}: min must not exceed max.")


def check_settings(requests: Sequence[RunRequest], own: Sequence[Sequence[str]], common: Sequence[str]) -> None:
    """BadInput for a setting that its run does not read, or that no run reads. `own`: the changes of each run."""
    for request, changes in zip(requests, own, strict=True):
        for name in map(_name, changes):
            reason = reason_not_simulated(request, name)
            if reason is not None:
                raise BadInput(f"{name} has no effect {reason}.")
    for name in map(_name, common):
        reasons = [reason_not_simulated(request, name) for request in requests]
        if reasons and all(reason is not None for reason in reasons):
            raise BadInput(f"{name} has no effect {reasons[0]}.")


def check_policy_option(changes: Sequence[str]) -> None:
    """The policy is an option of its own, because a baseline is not a setting of a fleet."""
    for change in changes:
        if _name(change) == "policy":
            raise BadInput(f"choose the policy with --policy {change.partition('=')[2][:60]}, not as a setting.")


def _name(change: str) -> str:
    return change.partition("=")[0]


def check_output(path: Path, *, is_new: bool = False) -> None:
    """BadInput if the file cannot be written. `is_new`: or if it exists."""
    if is_new and path.exists():
        raise BadInput(f"{path} exists and is not replaced: name a new file, and copy what you need from it.")
    reason = None
    if not path.parent.is_dir():
        reason = f"{path.parent} is not a folder"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    if reason is not None:
        raise BadInput(f"cannot write {path}: {reason}.")


def write_output(path: Path, text: str, *, is_new: bool = False) -> None:
    try:
        with path.open("x" if is_new else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}.") from None
