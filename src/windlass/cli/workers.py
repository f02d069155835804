"""`windlass workers`: lists workers, shows their details and their logs."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from windlass.cli.fleets import check_fleet_is_known
from windlass.cli.log_output import (
    NO_OUTPUT_HINT,
    LogTail,
    Timestamps,
    diagnostics_lines,
    print_log_lines,
    print_note,
)
from windlass.cli.options import AsJson, ConfigFile, DataDir, FleetFilter, command, load
from windlass.cli.output import print_json, print_table, printable
from windlass.config_loader import secrets_of
from windlass.cost.report import read_meter
from windlass.log_reader import follow_worker_log, read_worker_log
from windlass.model.errors import BadInput
from windlass.model.money import with_currency
from windlass.model.redaction import mask_of
from windlass.model.text_format import duration
from windlass.model.worker import Worker
from windlass.model.worker_log import WorkerLogLine
from windlass.operations import worker_not_found
from windlass.ports.fleets import FleetQueries
from windlass.wiring import providers, stores

app = typer.Typer(help="List workers and show their logs.", no_args_is_help=True)
# Phases of a boot, in order.
PHASES = ("running_at", "reachable_at", "joined_at", "activated_at", "first_claimed_at")


class HostGroup(StrEnum):
    HOST = "host"
    PLACE = "place"


WorkerId = Annotated[str, typer.Argument(help="Id of the worker.", metavar="WORKER")]


@app.command("list")
@command
async def list_(
    fleet: FleetFilter = None,
    terminated: Annotated[bool, typer.Option("--terminated", help="Include terminated workers.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List workers, oldest first."""
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        if fleet is not None:
            await check_fleet_is_known(store, fleet)
        found = [w for w in await store.workers(include_terminated=terminated) if fleet in (None, w.fleet)]
        now = await store.now()
    if as_json:
        print_json([_with_meter(worker, now) for worker in found])
        return
    rented = any(worker.bill is not None or worker.address is not None for worker in found)
    rows = [
        (
            worker.id,
            worker.fleet,
            worker.slot,
            _status_text(worker),
            duration((now - worker.created_at).total_seconds()),
            duration((now - worker.last_heartbeat).total_seconds()) if worker.last_heartbeat else "never",
            *(_machine_cells(worker, now) if rented else ()),
            worker.reason,
        )
        for worker in found
    ]
    if rows:
        machine = ("price/h", "cost", "billed until", "address") if rented else ()
        numbers = ("slot", "age", "heartbeat", "price/h", "cost")
        print_table(rows, "worker", "fleet", "slot", "status", "age", "heartbeat", *machine, "reason", right=numbers)
    else:
        print("no workers")


def _status_text(worker: Worker) -> str:
    notes = ["started by hand"] if worker.is_by_hand else []
    return ", ".join([worker.status, *notes, *(["paused"] if worker.is_paused else [])])


def _machine_cells(worker: Worker, now: datetime) -> tuple[str | None, str | None, str | None, str | None]:
    """Price, cost so far, end of the billed period, and address of its machine."""
    if worker.bill is None:
        return None, None, None, worker.address
    meter = read_meter(worker.bill, now)
    billed_until = f"{meter.billed_until:%H:%M:%S} UTC" if meter.billed_until is not None else "ended"
    price, cost = (with_currency(micros, meter.currency) for micros in (meter.micros_per_hour, meter.cost_micros))
    return price, cost, billed_until, worker.address


def _with_meter(worker: Worker, now: datetime) -> dict[str, Any]:
    return asdict(worker) | {"meter": read_meter(worker.bill, now) if worker.bill is not None else None}


@app.command()
@command
async def show(worker: WorkerId, config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show all fields and events of a worker."""
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        found = await _find_worker(store, worker)
        events = await store.events(worker_id=worker)
        diagnostics = await store.diagnostics(worker)
        now = await store.now()
    if as_json:
        shown = _with_meter(found, now)
        if diagnostics is not None:
            shown["metadata"] = {**found.metadata, "diagnostics": diagnostics}
        print_json({"worker": shown, "events": events})
        return
    fields = [(name, getattr(found, name)) for name in Worker.__dataclass_fields__ if name not in ("bill", *PHASES)]
    rows = [
        (name, _status_text(found) if name == "status" else _text(value))
        for name, value in fields
        if value not in (None, {}, ())
    ]
    moments = ((name, getattr(found, name)) for name in PHASES)
    for name, moment in moments:
        if moment is not None:
            rows.append((name, f"{_text(moment)} (after {duration((moment - found.created_at).total_seconds())})"))
    if found.bill is not None:
        price, cost, billed_until, _ = _machine_cells(found, now)
        rows += [("price_per_hour", price), ("cost", cost), ("billed_until", billed_until)]
    print_table(rows)
    for event in events:
        print(f"{event.at:%Y-%m-%d %H:%M:%S}  {event.code:<20} {printable(event.reason)}")
    for line in diagnostics_lines(diagnostics or {}):
        print(printable(line))


def _text(value: object) -> object:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return f"{value:%Y-%m-%d %H:%M:%S} UTC" if isinstance(value, datetime) else value


@app.command()
@command
async def hosts(
    by: Annotated[HostGroup, typer.Option("--by", help="One row per host, or per place.")] = HostGroup.HOST,
    fleet: FleetFilter = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the hosts of rented machines, with losses and failed checks.

    With --by place, the machines of a data center are counted together: a host that was used once says little.

    A Runpod fleet can exclude data centers and hosts by runpod.excluded_data_centers and runpod.excluded_hosts.
    """
    async with stores.store(load(config, data_dir).config, may_create=False) as store:
        if fleet is not None:
            await check_fleet_is_known(store, fleet)
        found = await (store.machine_hosts(fleet) if by is HostGroup.HOST else store.machine_places(fleet))
    if as_json:
        print_json([asdict(each) | {"loss_rate": each.loss_rate} for each in found])
        return
    rows = [
        (*where, each.machines, each.lost, f"{each.loss_rate:.0%}", each.failed_checks)
        for each in found
        for where in [(each.fleet, each.place, each.host) if by is HostGroup.HOST else (each.fleet, each.place)]
    ]
    if rows:
        numbers = ("machines", "lost", "loss rate", "failed checks")
        print_table(rows, "fleet", "place", *(("host",) if by is HostGroup.HOST else ()), *numbers, right=numbers)
    else:
        print("no rented machines")


@app.command()
@command
async def logs(
    worker: WorkerId,
    lines: LogTail = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until its termination.")] = False,
    timestamps: Timestamps = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of a worker and its handler.

    It stays readable after the machine is gone. If a machine never joined, the output of its boot is shown where it is
    known. With --json, one object per line.
    """
    loaded = load(config, data_dir)
    async with stores.store(loaded.config, may_create=False) as store:
        found = await _find_worker(store, worker)

        async def read() -> AsyncIterator[WorkerLogLine]:
            if follow and providers.has_worker_log(loaded.config, found.fleet, worker):
                async for text in providers.worker_log(loaded.config, found.fleet, worker, lines, is_following=True):
                    yield WorkerLogLine(None, text, worker)
                return
            file_lines = providers.worker_log(loaded.config, found.fleet, worker, lines, is_following=False)
            page = await read_worker_log(store, file_lines, worker, lines)
            for line in page.lines:
                yield line
            if follow:
                async for line in follow_worker_log(store, worker, page.cursor):
                    yield line

        mask = mask_of(secrets_of(loaded.config))
        count = await print_log_lines(read(), mask, has_timestamps=timestamps, as_json=as_json, is_flushed=follow)
    if not count and not as_json:
        print_note(f"no output of worker {worker} is known. {NO_OUTPUT_HINT}")


async def _find_worker(store: FleetQueries, worker_id: str) -> Worker:
    found = await store.worker(worker_id)
    if found is None:
        raise BadInput(f"{worker_not_found(worker_id)}. `windlass workers list --terminated` shows all.")
    return found
