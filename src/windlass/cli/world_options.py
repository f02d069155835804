"""Options of `simulate` and `tune` that describe the simulated machines."""

from pathlib import Path
from typing import Annotated

import typer

from windlass.model.errors import BadInput

BILLING_UNITS = {"second": 1, "hour": 3600}

TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="CSV file: arrival_s,duration_s[,queue]; .gz works.", metavar="FILE")
]
Slots = Annotated[int | None, typer.Option("--slots", help="Tasks that a machine runs at once (1).", min=1, max=10_000)]
BootTime = Annotated[float | None, typer.Option("--boot", help="Seconds from request to ready (120).", min=0.0)]
Billing = Annotated[str | None, typer.Option("--billing", help="Billed by the started `second` (default) or `hour`.")]
Interval = Annotated[float | None, typer.Option("--interval", help="Seconds between cycles (10).", min=0.05)]
MaxWorkers = Annotated[
    int | None, typer.Option("--max", help="Maximum number of machines (default: as many as tasks need).", min=1)
]


def billing_unit_s(billing: str | None) -> int | None:
    """The unit of --billing in seconds. None without the option."""
    if billing not in (None, *BILLING_UNITS):
        raise BadInput(f"--billing is {billing!r}: write second or hour.")
    return BILLING_UNITS[billing] if billing is not None else None
