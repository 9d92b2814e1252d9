"""A histogram of errors as an SVG picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 720, 320, 48, 22
_COLOURS = ("#1b6ca8", "#e0a030", "#b03a48", "#5b8c5a")


def histogram_svg(groups: Mapping[str, Sequence[float]], edges: Sequence[float], title: str, unit: str) -> str:
    """Stacked bars of how many values of each group lie between neighbouring ``edges``; the ends are open."""
    bins = len(edges) + 1

    def place(value: float) -> int:
        return sum(value >= edge for edge in edges)

    counts = {name: [0] * bins for name in groups}
    for name, values in groups.items():
        for value in values:
            counts[name][place(value)] += 1
    tallest = max(1, max(sum(own[b] for own in counts.values()) for b in range(bins)))
    bar = (_WIDTH - 2 * _MARGIN) / bins
    floor = _HEIGHT - _MARGIN
    scale = (floor - _MARGIN - _LEGEND) / tallest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif"'
        ' font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for index, name in enumerate(groups):
        left = _MARGIN + 130 * index
        parts.append(f'<rect x="{left}" y="30" width="10" height="10" fill="{_COLOURS[index % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{left + 15}" y="39">{escape(name)} ({len(groups[name])})</text>')
    for b in range(bins):
        x, y = _MARGIN + b * bar, float(floor)
        for index, own in enumerate(counts.values()):
            height = own[b] * scale
            y -= height
            if own[b]:
                parts.append(
                    f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{bar - 4:.1f}" height="{height:.1f}"'
                    f' fill="{_COLOURS[index % len(_COLOURS)]}"/>'
                )
        total = sum(own[b] for own in counts.values())
        if total:
            parts.append(f'<text x="{x + bar / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">{total}</text>')
    for index, edge in enumerate(edges):
        x = _MARGIN + (index + 1) * bar
        parts.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{edge:g}</text>')
    parts.append(f'<line x1="{_MARGIN}" y1="{floor}" x2="{_WIDTH - _MARGIN}" y2="{floor}" stroke="black"/>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(unit)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
