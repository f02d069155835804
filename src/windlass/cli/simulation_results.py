"""Prints the results of `windlass simulate`, of one fleet or of several with their sum, and writes its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.cli.output import print_json, print_table
from windlass.cli.simulation_options import write_output
from windlass.model.money import with_currency
from windlass.simulator.measures import RunResult, total_result
from windlass.simulator.past import FleetPast
from windlass.simulator.report import HEADINGS, html_report, table_rows
from windlass.simulator.runs import RunRequest, billed_by
from windlass.simulator.trace import Trace


@dataclass(slots=True)
class FleetSimulation:
    """The runs of one fleet, or of a trace without a fleet, and their results."""

    name: str
    trace: Trace
    past: FleetPast | None
    requests: list[RunRequest]
    results: list[RunResult] = field(default_factory=list)


def print_simulations(simulations: Sequence[FleetSimulation], *, as_json: bool) -> None:
    """JSON: of one fleet a run, or its `runs`; of several `fleets` by name, and `total` with a sum for each run."""
    if as_json:
        plain = [[result.to_plain() | _cost(each.past, result) for result in each.results] for each in simulations]
        if len(simulations) > 1:
            fleets = {each.name: {"runs": runs} for each, runs in zip(simulations, plain, strict=True)}
            print_json({"fleets": fleets, "total": [result.to_plain() | cost for result, cost in _totals(simulations)]})
        else:
            print_json(plain[0][0] if len(plain[0]) == 1 else {"runs": plain[0]})
        return
    for each in simulations:
        for note in each.past.notes if each.past is not None else ():
            print(f"{each.name}: {note}" if len(simulations) > 1 else note)
    rows = _rows(simulations)
    texts, headings = table_rows([result for result, _ in rows]), HEADINGS
    if any(cost for _, cost in rows):
        headings = (*headings, "cost")
        texts = [(*text, _cost_text(cost)) for text, (_, cost) in zip(texts, rows, strict=True)]
    print_table(texts, *headings, right=headings[1:])


def write_report(path: Path, simulations: Sequence[FleetSimulation], seed: int) -> None:
    notes: list[str] = []
    for each in simulations:
        world, cycle_s = each.requests[0].world, each.requests[0].config.poll_interval_s
        of_fleet = f"Fleet {each.name}: " if len(simulations) > 1 else ""
        notes.append(
            f"{of_fleet}{len(each.trace.arrivals)} tasks over {each.trace.span_s / 86400:.2f} days, "
            f"{world.slots} slots per machine, boot {world.boot_s:g} s, "
            f"billed by the {billed_by(world.billing_unit_s)}, cycles of {cycle_s:g} s, seed {seed}."
        )
        notes += each.past.notes[1:] if each.past is not None else ()
    title = ", ".join(dict.fromkeys(each.trace.name for each in simulations))
    write_output(path, html_report(f"Simulation of {title}", notes, [result for result, _ in _rows(simulations)]))


def _totals(simulations: Sequence[FleetSimulation]) -> list[tuple[RunResult, dict[str, Any]]]:
    """Sums the results of each run that all fleets have. Its cost is known if the fleets pay in one currency."""
    found = []
    by_label = [{_shared_label(result): result for result in each.results} for each in simulations]
    for label in by_label[0]:
        parts = [results[label] for results in by_label if label in results]
        if len(parts) < len(simulations):
            continue
        costs = [_cost(each.past, part) for each, part in zip(simulations, parts, strict=True)]
        cost: dict[str, Any] = {}
        if len({each.get("currency") for each in costs}) == 1 and "currency" in costs[0]:
            cost = {"cost_micros": sum(each["cost_micros"] or 0 for each in costs), "currency": costs[0]["currency"]}
        found.append((total_result(label, parts), cost))
    return found


def _shared_label(result: RunResult) -> str:
    """The running settings of each fleet are one run, whatever their policies are."""
    return "running" if result.policy.startswith("running: ") else result.policy


def _rows(simulations: Sequence[FleetSimulation]) -> list[tuple[RunResult, dict[str, Any]]]:
    """Each result with its cost. With several fleets their names are in the labels, and totals follow."""
    rows = [(result, _cost(each.past, result)) for each in simulations for result in each.results]
    if len(simulations) == 1:
        return rows
    names = [each.name for each in simulations for _ in each.results]
    totals = _totals(simulations)
    names += ["total"] * len(totals)
    return [
        (replace(result, policy=f"{name}: {result.policy}"), cost)
        for name, (result, cost) in zip(names, rows + totals, strict=True)
    ]


def _cost_text(cost: Mapping[str, Any]) -> str:
    return with_currency(cost["cost_micros"] or 0, cost["currency"]) if cost else ""


def _cost(past: FleetPast | None, result: RunResult) -> dict[str, Any]:
    if past is None or past.currency is None:
        return {}
    return {"cost_micros": past.cost_micros(result.machine_seconds_billed), "currency": past.currency}
