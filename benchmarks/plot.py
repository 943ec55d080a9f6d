"""Bar charts as SVG, written by hand: one bar a system, a line from the lowest to the highest run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.figures import Figure

WIDTH, LEFT, RIGHT, ROW, TOP = 760, 190, 150, 26, 52
OURS, OTHERS, LINE, INK = "#0b6e4f", "#9db4c0", "#253237", "#1b1b1b"


def bars(title: str, figures: Sequence[Figure], titles: Mapping[str, str]) -> str:
    """Return a chart, the best first; `titles` has the names of the systems, or those of the quantities."""
    ordered = sorted(figures, key=lambda f: f.median, reverse=figures[0].more_is_better)
    most = max(f.high for f in ordered) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + ROW * len(ordered) + 14
    better = "more is better" if ordered[0].more_is_better else "less is better"
    box = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    text = f'font-family="sans-serif" font-size="13" fill="{INK}" role="img" aria-label="{escape(title)}"'
    how = f"{ordered[0].unit}, median of {len(ordered[0].values)} runs, line from lowest to highest; {better}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {text}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="40" font-size="11">{escape(how)}</text>',
    ]
    for place, figure in enumerate(ordered):
        y = TOP + place * ROW
        colour = OURS if figure.system == "ours" else OTHERS
        middle, name = (
            y + ROW / 2 - 3,
            escape(titles.get(figure.what) or titles.get(figure.system, figure.system)),
        )
        length, low, end = (max(1.0, value * scale) for value in (figure.median, figure.low, figure.high))
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 6}" fill="{colour}"/>',
            f'<path d="M{LEFT + low:.1f} {middle}H{LEFT + end:.1f}" stroke="{LINE}" stroke-width="2"/>',
            f'<text x="{LEFT + end + 8:.1f}" y="{y + 14}">{number(figure.median)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def number(value: float) -> str:
    """Write a figure with as many digits as it deserves."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
