"""Pictures of a report as inline SVG: curves, bars, and the lanes of a step (pure).

Colours come from the page (classes and CSS variables), so that light and dark share one picture. Values show when a
pointer is over them, by CSS alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

__all__ = ["Lane", "Slice", "bars", "curve", "thin", "ticks", "timeline"]

MAX_POINTS = 240
"""Of a curve; more steps than that are averaged in groups, with their range behind the line."""
MAX_SLICES = 6000
"""Of a timeline: beyond that the shortest are left out."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One action: start and length in microseconds, text for the pointer, class of its colour."""

    start_us: float
    length_us: float
    text: str
    kind: str


@dataclass(slots=True)
class Lane:
    """One row of a timeline."""

    group: str
    name: str
    slices: list[Slice] = field(default_factory=list)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover ``low`` to ``high``, about ``count`` apart."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def thin(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float, float, float]]:
    """(x of the last, mean, least, greatest) of at most `MAX_POINTS` groups of neighbours."""
    size = max(-(-len(xs) // MAX_POINTS), 1)
    groups = [(xs[i : i + size], ys[i : i + size]) for i in range(0, len(xs), size)]
    return [(x[-1], sum(y) / len(y), min(y), max(y)) for x, y in groups]


def short(value: float) -> str:
    """Four digits at most, with the unit prefixes of the axis labels."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e4 or size < 1e-2:
        for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= limit:
                return f"{value / limit:.3g}{letter}"
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{value:.4g}"


def curve(
    name: str,
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    points: Sequence[tuple[float, float]] = (),
    zero: bool = False,
) -> Markup:
    """A line over steps.

    Args:
        name: For readers who do not see it.
        xs: Steps.
        ys: Values; those that are not finite are left out.
        points: A second, sparse series (evaluations), as dots.
        zero: The axis starts at 0.
    """
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not pairs:
        return Markup('<p class="none">no values yet</p>')
    data = thin([x for x, _ in pairs], [y for _, y in pairs])
    values = [v for _, _, low, high in data for v in (low, high)] + [y for _, y in points] + ([0.0] if zero else [])
    rows = ticks(min(values), max(values))
    width, height, left, right, top, bottom = 420, 190, 46, 12, 14, 24
    first, last = pairs[0][0], pairs[-1][0]
    span = (last - first) or 1.0

    def at_x(x: float) -> float:
        return left + (width - left - right) * (0.5 if last == first else (x - first) / span)

    def at_y(y: float) -> float:
        return height - bottom - (height - top - bottom) * (y - rows[0]) / (rows[-1] - rows[0])

    parts = [Markup('<svg class="curve" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, name)]
    for row in rows:
        y = at_y(row)
        parts.append(Markup(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'))
        parts.append(
            Markup(f'<text class="tick" x="{left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(row)}</text>')
        )
    for x in dict.fromkeys((first, last) if last - first < 4 else (first, first + (last - first) // 2, last)):
        anchor = "middle" if first < x < last or first == last else ("start" if x == first else "end")
        parts.append(
            Markup(f'<text class="tick" x="{at_x(x):.1f}" y="{height - 7}" text-anchor="{anchor}">{x:g}</text>')
        )
    if any(high > low for _, _, low, high in data):
        upper = [f"{at_x(x):.1f},{at_y(high):.1f}" for x, _, _, high in data]
        lower = [f"{at_x(x):.1f},{at_y(low):.1f}" for x, _, low, _ in reversed(data)]
        parts.append(Markup(f'<polygon class="range" points="{" ".join(upper + lower)}"/>'))
    line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y, _, _ in data)
    parts.append(Markup(f'<polyline class="line" points="{line}"/>'))
    strip = (width - left - right) / len(data)
    for index, (x, y, _, _) in enumerate(data):
        edge = min(max(at_x(x) - strip / 2, left), width - right - strip) if len(data) > 1 else left
        dot = "dot shown" if len(data) <= 40 or index == len(data) - 1 else "dot"
        parts.append(
            Markup(
                f'<g class="pt"><rect x="{edge:.1f}" y="0" width="{strip:.1f}" height="{height - bottom}"/>'
                f'<circle class="{dot}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.4"/>'
                f'<text class="value" x="{width - right}" y="10" text-anchor="end">step {x:g}: {y:.6g}</text></g>'
            )
        )
    for x, y in points:
        parts.append(
            Markup(
                f'<g class="pt"><circle class="eval" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="4"/>'
                f'<text class="value" x="{width - right}" y="10" text-anchor="end">'
                f"held out, step {x:g}: {y:.6g}</text></g>"
            )
        )
    return Markup("").join([*parts, Markup("</svg>")])


def bars(value: float, limit: float | None, largest: float) -> Markup:
    """A horizontal bar of ``value`` with a mark at ``limit``, on the scale of ``largest``."""
    scale = 100.0 / (largest or 1.0)
    kind = "over" if limit and value > limit else "bar"
    mark = f'<line class="limit" x1="{limit * scale:.2f}" x2="{limit * scale:.2f}" y1="0" y2="10"/>' if limit else ""
    return Markup(
        '<svg class="bars" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="10" rx="1"/>'
        f'<rect class="{kind}" width="{value * scale:.2f}" height="10" rx="1"/>{mark}</svg>'
    )


def timeline(lanes: Sequence[Lane], length_us: float) -> Markup:
    """Rows of slices over the time of a step."""
    width, left, row, top, gap = 1000, 172, 22, 22, 8
    shown = sorted((each.length_us for lane in lanes for each in lane.slices), reverse=True)
    shortest = shown[MAX_SLICES] if len(shown) > MAX_SLICES else -1.0
    scale = (width - left - 10) / (length_us or 1.0)
    body: list[Markup] = []
    y, group = float(top), ""
    for lane in lanes:
        if lane.group != group:
            y += gap if group else 0
            group = lane.group
        body.append(
            Markup(
                '<text class="lane" x="{}" y="{:.1f}" text-anchor="end">{}</text>'
                '<rect class="track" x="{}" y="{:.1f}" width="{}" height="{}" rx="2"/>'
            ).format(left - 8, y + 13.5, lane.name, left, y, width - left - 10, row - 3)
        )
        for each in lane.slices:
            if each.length_us > shortest:
                body.append(
                    Markup(
                        '<rect class="s {}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{}"><title>{}</title></rect>'
                    ).format(
                        each.kind, left + each.start_us * scale, y, max(each.length_us * scale, 0.6), row - 3, each.text
                    )
                )
        y += row
    head: list[Markup] = []
    for tick in ticks(0.0, length_us, 8):
        x = left + tick * scale
        if x <= width - 9:
            label = f"{tick / 1e6:g} s" if length_us >= 2e6 else f"{tick / 1e3:g} ms"
            head.append(Markup(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{y:.0f}"/>'))
            head.append(Markup(f'<text class="tick" x="{x:.1f}" y="12" text-anchor="middle">{label}</text>'))
    start = Markup(
        f'<svg class="timeline" viewBox="0 0 {width} {y + 4:.0f}" role="img" aria-label="timeline of a step">'
    )
    return Markup("").join([start, *head, *body, Markup("</svg>")])
