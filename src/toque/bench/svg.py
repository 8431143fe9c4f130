"""Charts as SVG text, without a library: lines over a number, and bars by name. Colours follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
.chart { --ink: #1f2328; --soft: #6a737d; --grid: #d9dee3; --s0: #0b6bcb; --s1: #c2410c; --s2: #15803d; --s3: #7e22ce;
  --s4: #b45309; --s5: #0e7490; --paper: #ffffff; font: 12px system-ui, sans-serif; background: var(--paper); }
@media (prefers-color-scheme: dark) { .chart { --ink: #e6edf3; --soft: #9aa4af; --grid: #343b44; --s0: #58a6ff;
  --s1: #ff9b5e; --s2: #56d364; --s3: #d2a8ff; --s4: #e3b341; --s5: #39c5cf; --paper: #0d1117; } }
.chart text { fill: var(--ink); } .chart .soft { fill: var(--soft); }
.chart .title { font-size: 14px; font-weight: 600; }
.chart .grid { stroke: var(--grid); } .chart .line { fill: none; stroke-width: 2; }
"""
_COLORS = 6
_WIDTH, _PLOT_HEIGHT = 560, 220
_LEFT, _RIGHT, _BOTTOM = 64, 32, 44
_LEGEND_TOP, _LEGEND_LINE = 32, 16


@dataclass(frozen=True, slots=True)
class Series:
    """A line: points from left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = True


def nice_ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least ``top``, about ``count`` steps of 1, 2 or 5 times a power of ten."""
    if not top > 0 or not math.isfinite(top):
        top = 1.0
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(round(top / step, 9)) + 1)]


def _legend(names: Sequence[str], left: int, width: int) -> tuple[list[str], int]:
    """Names with their colours, in as many lines as they need, and where what follows may begin."""
    parts, x, y = [], left, _LEGEND_TOP
    for index, name in enumerate(names):
        length = 28 + 7 * len(name)
        if x > left and x + length > width:
            x, y = left, y + _LEGEND_LINE
        parts.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" style="fill: var(--s{index % _COLORS})"/>'
        )
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{escape(name)}</text>')
        x += length
    return parts, y + _LEGEND_LINE + 8


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Both axes begin at 0."""
    shown = [s for s in series if s.points]
    xs = nice_ticks(max((x for s in shown for x, _ in s.points), default=1.0))
    ys = nice_ticks(max((y for s in shown for _, y in s.points), default=1.0))
    wide, high = _WIDTH - _LEFT - _RIGHT, _PLOT_HEIGHT
    legend, top = _legend([s.name for s in shown], _LEFT, _WIDTH)

    def px(x: float) -> float:
        return round(_LEFT + wide * x / xs[-1], 1)

    def py(y: float) -> float:
        return round(top + high * (1 - y / ys[-1]), 1)

    parts = legend
    for x in xs:
        parts.append(f'<line class="grid" x1="{px(x)}" y1="{top}" x2="{px(x)}" y2="{top + high}"/>')
        parts.append(
            f'<text class="soft" x="{px(x)}" y="{top + high + 16}" text-anchor="middle">{x:g}</text>'
        )
    for y in ys:
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{py(y)}" x2="{_LEFT + wide}" y2="{py(y)}"/>')
        parts.append(f'<text class="soft" x="{_LEFT - 6}" y="{py(y) + 4}" text-anchor="end">{y:g}</text>')
    for index, line in enumerate(shown):
        color = f"var(--s{index % _COLORS})"
        path = " ".join(f"{px(x)},{py(y)}" for x, y in line.points)
        parts.append(f'<polyline class="line" style="stroke: {color}" points="{path}"/>')
        if line.dots:
            for x, y in line.points:
                hint = escape(f"{line.name}: {y:.4g} at {x:.4g}")
                parts.append(
                    f'<circle cx="{px(x)}" cy="{py(y)}" r="3" style="fill: {color}"><title>{hint}</title></circle>'
                )
    parts.append(
        f'<text class="soft" x="{_LEFT + wide / 2}" y="{top + high + 36}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="soft" transform="translate(14 {top + high / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return _frame(title, _WIDTH, top + high + _BOTTOM, parts)


def bar_chart(
    title: str,
    unit: str,
    groups: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    *,
    own_scales: bool = False,
) -> str:
    """Groups of horizontal bars: (group, [(name, value)]). The same name has the same colour in every group. With
    ``own_scales`` a bar's length is its share of its group's longest, for groups of very different size."""
    names = list(dict.fromkeys(name for _, bars in groups for name, _ in bars))
    left = 24 + 7 * max((len(group) for group, _ in groups), default=0)
    width = left + 460
    parts, y = _legend(names, 16, width)
    highest = max((value for _, bars in groups for _, value in bars), default=0.0)
    for group, bars in groups:
        longest = (max((value for _, value in bars), default=0.0) if own_scales else highest) or 1.0
        middle = y + 8 * len(bars) + 4
        parts.append(f'<text x="{left - 8}" y="{middle}" text-anchor="end">{escape(group)}</text>')
        for name, value in bars:
            color = f"var(--s{names.index(name) % _COLORS})"
            long = round(330 * value / longest, 1)
            parts.append(
                f'<rect x="{left}" y="{y}" width="{long}" height="12" style="fill: {color}">'
                f"<title>{escape(f'{group}, {name}: {value:.4g} {unit}')}</title></rect>"
            )
            parts.append(f'<text x="{left + long + 6}" y="{y + 10}">{value:.4g} {escape(unit)}</text>')
            y += 16
        y += 10
    return _frame(title, width, y + 8, parts)


def _frame(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f'<text class="title" x="16" y="20">{escape(title)}</text>', *parts, "</svg>"])


def standalone(chart: str) -> str:
    """A chart as a file of its own."""
    head, rest = chart.split(">", 1)
    return f"{head}><style>{STYLE}</style>{rest}\n"
