"""The HTML report of a comparison: one file without external resources."""

from collections.abc import Sequence
from html import escape

from windlass.simulator.charts import ChartLine, line_chart, pareto_chart, wait_chart
from windlass.simulator.measures import RunResult

HEADINGS: tuple[str, ...] = (
    "policy",
    "machine hours",
    "cost / optimum",
    "wait mean",
    "wait p50",
    "wait p95",
    "wait p99",
    "started",
)
HEADINGS += ("peak", "used", "(cost + wait) / optimum")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; margin: .5rem 0 1.5rem; }
"""


def table_rows(results: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """One row for each result, in the order of HEADINGS."""
    return [
        (
            result.policy,
            f"{result.machine_seconds_billed / 3600:.1f}",
            f"{result.cost_ratio:.3f}",
            f"{result.wait_mean_s:.1f} s",
            f"{result.wait_p50_s:.0f} s",
            f"{result.wait_p95_s:.0f} s",
            f"{result.wait_p99_s:.0f} s",
            f"{result.machines_started}",
            f"{result.machines_peak}",
            f"{result.utilisation:.0%}",
            f"{result.joint_ratio:.3f}",
        )
        for result in results
    ]


def report_charts(results: Sequence[RunResult]) -> list[str]:
    """Queue, machines, billed hours and waits of the results with samples; cost against wait of all."""
    drawn = [result for result in results if result.samples]
    return [
        line_chart(
            "Queued tasks", [ChartLine(r.policy, [(s.at, s.queued) for s in r.samples]) for r in drawn], "tasks"
        ),
        line_chart(
            "Machines",
            [ChartLine(r.policy, [(s.at, s.ready + s.booting) for s in r.samples]) for r in drawn],
            "machines",
        ),
        line_chart(
            "Machine hours billed",
            [ChartLine(r.policy, [(s.at, s.billed_s / 3600) for s in r.samples]) for r in drawn],
            "hours",
        ),
        wait_chart(drawn),
        pareto_chart(
            [(r.policy, r.wait_p95_s, r.machine_seconds_billed / 3600) for r in results],
            "p95 wait in seconds",
            "Machine hours against p95 wait",
        ),
    ]


def html_report(title: str, notes: Sequence[str], results: Sequence[RunResult]) -> str:
    """A table of all results, and charts."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table_rows(results)
    )
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{paragraphs}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"{''.join(report_charts(results))}</body></html>\n"
    )
