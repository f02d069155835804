"""Figures from interleaved rounds: medians, spread, and ratios taken within a round.

The machine is shared and noisy, but what disturbs one contender of a round mostly disturbs its neighbours too. So a
ratio is made of the two figures of one round, and the median of those ratios is what counts.
"""

import statistics
from collections.abc import Mapping, Sequence

Samples = Mapping[str, Sequence[float]]


def ratio(samples: Samples, above: str, below: str) -> tuple[float, float, float]:
    """Median, lowest and highest of `above` / `below`, round by round."""
    ratios = [a / b for a, b in zip(samples[above], samples[below], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def rate_table(samples: Samples, unit: str, ours: Sequence[str]) -> str:
    """Markdown: each contender's median and spread, and how many times as fast each of `ours` is."""
    head = [unit, "median", "lowest to highest", *(f"{name} to it" for name in ours)]
    rows = [
        [
            name,
            f"{statistics.median(values):,.0f}",
            f"{min(values):,.0f} to {max(values):,.0f}",
            *(_ratio_cell(samples, mine, name) for mine in ours),
        ]
        for name, values in samples.items()
    ]
    return table(head, rows)


def _ratio_cell(samples: Samples, mine: str, name: str) -> str:
    if mine == name:
        return ""
    middle, lowest, highest = ratio(samples, mine, name)
    return f"**{middle:.2f}** ({lowest:.2f} to {highest:.2f})"


def report_goals(goals: Mapping[str, bool]) -> bool:
    """Print whether each goal is met. Returns whether all are."""
    print()
    for goal, is_met in goals.items():
        print(f"{'met   ' if is_met else 'MISSED'} {goal}")
    is_good = all(goals.values())
    print(f"\ngoals: {'met' if is_good else 'missed'}")
    return is_good


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
