"""Charts of simulation results as SVG: lines over time, the distribution of waits, cost against wait.

Plain text without scripts or external resources, readable on light and dark backgrounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from windlass.simulator.measures import RunResult, quantile

WIDTH, HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 40
# Distinct for readers with colour blindness (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888", "#b8a900")
_TEXT = "#666"
_GRID = "#9994"


@dataclass(frozen=True, slots=True)
class ChartLine:
    label: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, lines: Sequence[ChartLine], y_label: str) -> str:
    """Lines over days, or hours of a short run."""
    end_s = max((line.points[-1][0] for line in lines if line.points), default=1.0)
    unit, unit_s = ("days", 86_400.0) if end_s > 172_800 else ("hours", 3600.0)
    top = max((value for line in lines for _, value in line.points), default=1.0) or 1.0
    axes = _Axes(0.0, max(end_s, 1.0) / unit_s, 0.0, top)
    parts = [axes.frame(title, unit, y_label)]
    for number, line in enumerate(lines):
        path = " ".join(f"{axes.x(at / unit_s):.1f},{axes.y(value):.1f}" for at, value in line.points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    parts.append(_legend([line.label for line in lines]))
    return _svg(parts, title)


def wait_chart(results: Sequence[RunResult]) -> str:
    """Share of tasks that waited at most this long."""
    lines = []
    longest = max((quantile(result.waits_s, 0.99) for result in results), default=1.0) or 1.0
    for result in results:
        shares = [index / 100 for index in range(101)]
        points = [(min(quantile(result.waits_s, share), longest), share * 100) for share in shares]
        lines.append(ChartLine(result.policy, points))
    axes = _Axes(0.0, longest, 0.0, 100.0)
    parts = [axes.frame("Waits: share of tasks that started within", "seconds", "% of tasks")]
    for number, line in enumerate(lines):
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in line.points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    parts.append(_legend([line.label for line in lines]))
    return _svg(parts, "distribution of waits")


def pareto_chart(points: Sequence[tuple[str, float, float]], x_label: str, title: str = "Cost against wait") -> str:
    """One point for each (label, wait, cost). Lower left is better; a point on the line is beaten by no other."""
    rightmost = max((wait for _, wait, _ in points), default=1.0) or 1.0
    highest = max((cost for _, _, cost in points), default=1.0) or 1.0
    axes = _Axes(0.0, rightmost * 1.05, 0.0, highest * 1.1)
    parts = [axes.frame(title, x_label, "cost")]
    front: list[tuple[float, float]] = []
    for _, wait, cost in sorted(points, key=lambda point: (point[1], point[2])):
        if not front or cost < front[-1][1]:
            front.append((wait, cost))
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in front)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{_TEXT}" stroke-dasharray="4 3"/>')
    taken: list[tuple[float, float, float]] = []
    for number, (label, wait, cost) in enumerate(points):
        colour, x, y = COLOURS[number % len(COLOURS)], axes.x(wait), axes.y(cost)
        anchor, shift = ("end", -8) if x > WIDTH * 0.75 else ("start", 8)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        begins = x + shift - (7.0 * len(label) if anchor == "end" else 0.0)
        label_y = _free_y(taken, begins, begins + 7.0 * len(label), y + 4)
        taken.append((begins, begins + 7.0 * len(label), label_y))
        parts.append(
            f'<text x="{x + shift:.1f}" y="{label_y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(label)}</text>'
        )
    return _svg(parts, title)


def _free_y(taken: Sequence[tuple[float, float, float]], begins: float, ends: float, y: float) -> float:
    """The nearest position at which a label overlaps no other one."""
    for shift in (0, -13, 13, -26, 26, -39, 39):
        if all(ends < left or begins > right or abs(y + shift - at) >= 12 for left, right, at in taken):
            return y + shift
    return y


@dataclass(frozen=True, slots=True)
class _Axes:
    x_from: float
    x_until: float
    y_from: float
    y_until: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_from) / (self.x_until - self.x_from) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_from) / (self.y_until - self.y_from) * (HEIGHT - _TOP - _BOTTOM)

    def frame(self, title: str, x_label: str, y_label: str) -> str:
        parts = [f'<text x="{_LEFT}" y="16" font-weight="bold" fill="{_TEXT}">{escape(title)}</text>']
        for tick in _ticks(self.y_from, self.y_until):
            y = self.y(tick)
            parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{_TEXT}">{tick:g}</text>')
        for tick in _ticks(self.x_from, self.x_until):
            x = self.x(tick)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 24}" text-anchor="middle" fill="{_TEXT}">{tick:g}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle" fill="{_TEXT}">{escape(x_label)}</text>'
        )
        parts.append(
            f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle" fill="{_TEXT}">'
            f"{escape(y_label)}</text>"
        )
        return "".join(parts)


def _ticks(start: float, end: float) -> list[float]:
    """About five round values."""
    raw = (end - start) / 5
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= raw), power)
    count = int((end - start) / step + 1e-9)
    return [round(start + index * step, 10) for index in range(count + 1)]


def _legend(labels: Sequence[str]) -> str:
    parts, x = [], _LEFT + 4.0
    for number, label in enumerate(labels):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x:.0f}" y="22" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="31" fill="{_TEXT}">{escape(label)}</text>')
        # Wide enough for the larger text of phones.
        x += 30 + 9.0 * len(label)
    return "".join(parts)


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</svg>'
    )
