"""/billing: the ledger in buckets of time. Only buckets in which something was spent have a record."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction

from windlass_emulators.http import Json
from windlass_emulators.runpod.account import EmulatedRunpodAccount
from windlass_emulators.runpod.calls import RunpodAnswer, RunpodCall, shown_time
from windlass_emulators.runpod.errors import RunpodApiError
from windlass_emulators.runpod.ledger import CPU, GPU, VOLUME, RunpodBillLine, rounded
from windlass_emulators.runpod.render import MICROS

DEFAULT_WINDOW = timedelta(days=30)
SIZES = ("hour", "day", "week", "month", "year")
_LENGTHS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}
# More than two years of hours. Nobody reads more, and a typing error should not keep the emulator busy.
MAX_BUCKETS = 20_000

_TOTALS = (
    "podGpuAmount", "podCpuAmount", "podDiskAmount", "serverlessGpuAmount", "serverlessCpuAmount",
    "serverlessDiskAmount", "serverlessFeeAmount", "storageStandardAmount", "storageHighPerformanceAmount",
    "endpointAmount", "clusterGpuAmount", "clusterDiskAmount", "clusterNetworkingAmount",
)  # fmt: skip
Amounts = dict[str, Fraction]


def _start_of(moment: datetime, size: str) -> datetime:
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return {
        "hour": moment.replace(minute=0, second=0, microsecond=0),
        "day": day,
        "week": day - timedelta(days=day.weekday()),
        "month": day.replace(day=1),
        "year": day.replace(month=1, day=1),
    }[size]


def _next(start: datetime, size: str) -> datetime:
    if size == "month":
        return _start_of(start + timedelta(days=31), "month")
    if size == "year":
        return start.replace(year=start.year + 1)
    return start + _LENGTHS[size]


@dataclass(frozen=True, slots=True)
class _Window:
    start: datetime
    end: datetime
    size: str

    def buckets(self) -> Iterator[tuple[datetime, datetime]]:
        start = self.start
        while start < self.end:
            yield start, _next(start, self.size)
            start = _next(start, self.size)

    def to_json(self) -> Json:
        return {**_span(self.start, self.end), "bucketSize": self.size}


def _span(start: datetime, end: datetime) -> Json:
    return {"startTime": shown_time(start), "endTime": shown_time(end)}


def _window(account: EmulatedRunpodAccount, call: RunpodCall) -> _Window:
    size = call.one_of("bucketSize", SIZES, "day")
    start, end = call.moment("startTime"), call.moment("endTime")
    if call.has("lastN"):
        if start or end:
            raise RunpodApiError(400, "lastN is mutually exclusive with startTime and endTime")
        buckets = call.number("lastN", 1, least=1, most=MAX_BUCKETS)
        start = _start_of(account.now, size)
        try:
            for _ in range(buckets - 1):
                start = _start_of(start - timedelta(microseconds=1), size)
        except OverflowError:
            raise RunpodApiError(400, "lastN begins before all time") from None
        return _Window(start, _next(_start_of(account.now, size), size), size)
    end = end or account.now
    start = _start_of(start or end - DEFAULT_WINDOW, size)
    if end < start:
        raise RunpodApiError(400, "startTime must be before endTime")
    last = _start_of(end, size)
    window = _Window(start, end if end == last else _next(last, size), size)
    if (window.end - window.start) / _LENGTHS.get(size, timedelta(days=28)) > MAX_BUCKETS:
        raise RunpodApiError(400, f"the window has more than {MAX_BUCKETS} buckets")
    return window


def _in_dollars(amounts: Amounts) -> Json:
    return {name: rounded(micros) / MICROS for name, micros in amounts.items()}


def _answer(
    account: EmulatedRunpodAccount,
    call: RunpodCall,
    filter_name: str,
    counted: str,
    lines: list[RunpodBillLine],
    split: Callable[[RunpodBillLine], str],
    parts: tuple[str, ...],
) -> RunpodAnswer:  # fmt: skip
    """One record per line and bucket, its amount under the name that `split` gives."""
    window = _window(account, call)
    only = call.asked(filter_name)
    records: list[Json] = []
    totals: Amounts = dict.fromkeys(("totalAmount", *parts), Fraction())
    for start, end in window.buckets():
        for line in lines:
            micros = line.exact_micros(account.now, start, end)
            if not micros or (only is not None and line.id != only):
                continue
            amounts = {**dict.fromkeys(parts, Fraction()), split(line): micros, "totalAmount": micros}
            totals = {name: totals[name] + amounts[name] for name in totals}
            records.append({**_span(start, end), filter_name: line.id, **_in_dollars(amounts)})
    metadata = {
        "query": {**window.to_json(), filter_name: only},
        "recordCount": len(records),
        counted: len({record[filter_name] for record in records}),
        "totals": _in_dollars(totals),
    }
    return RunpodAnswer(200, {"records": records, "metadata": metadata})


def pods(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    lines = list(account.ledger.lines(GPU, CPU))
    parts = ("gpuAmount", "cpuAmount", "diskAmount")
    return _answer(account, call, "podId", "uniquePodCount", lines, lambda line: f"{line.kind}Amount", parts)


def network_volumes(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    lines = list(account.ledger.lines(VOLUME))
    parts = ("standardAmount", "highPerformanceAmount")
    return _answer(
        account, call, "networkVolumeId", "uniqueNetworkVolumeCount", lines,
        lambda line: parts[line.is_high_performance], parts,
    )  # fmt: skip


def serverless(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    parts = ("gpuAmount", "cpuAmount", "diskAmount", "feeAmount")
    return _answer(account, call, "serverlessId", "uniqueServerlessCount", [], lambda _: "", parts)


def clusters(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    parts = ("gpuAmount", "diskAmount", "networkingAmount")
    return _answer(account, call, "clusterId", "uniqueClusterCount", [], lambda _: "", parts)


def endpoints(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    query = _window(account, call).to_json()
    return RunpodAnswer(
        200, {"records": [], "metadata": {"query": query, "recordCount": 0, "totals": {"totalAmount": 0.0}}}
    )


def everything(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    window = _window(account, call)
    totals: Amounts = dict.fromkeys(("totalAmount", *_TOTALS), Fraction())
    records: list[Json] = []
    for start, end in window.buckets():
        amounts: Amounts = dict.fromkeys(totals, Fraction())
        for line in account.ledger.lines(GPU, CPU, VOLUME):
            micros = line.exact_micros(account.now, start, end)
            amounts[_total_of(line)] += micros
            amounts["totalAmount"] += micros
        if amounts["totalAmount"]:
            totals = {name: totals[name] + amounts[name] for name in totals}
            records.append({**_span(start, end), **_in_dollars(amounts)})
    metadata = {"query": window.to_json(), "recordCount": len(records), "totals": _in_dollars(totals)}
    return RunpodAnswer(200, {"records": records, "metadata": metadata})


def _total_of(line: RunpodBillLine) -> str:
    if line.kind == VOLUME:
        return "storageHighPerformanceAmount" if line.is_high_performance else "storageStandardAmount"
    return "podGpuAmount" if line.kind == GPU else "podCpuAmount"
