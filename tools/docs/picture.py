"""docs/ring.svg: four ranks, their K/V blocks in transit, and which pairs have met, from a run's trace."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..website import moving_ring

P = moving_ring.P
COLOURS = ("#0072b2", "#d55e00", "#00785a", "#9b4a7a")
"""The course's palette, with darker colours where white letters would be hard to read."""
WIDTH, PANEL, TOP = 880, 210, 52
RADIUS, CENTRE, BLOCK, CELL = 58, 150, 36, 20
PAPER, EDGE, INK, QUIET = "#ffffff", "#d0d7de", "#1f2328", "#57606a"


def drawing() -> str:
    """Return the SVG. It has a white background, so it looks the same on light and dark pages."""
    steps = moving_ring.run()
    name = "Ring attention on four ranks, one picture for each step"
    words = " ".join(frame.describe() for frame in steps)
    height = TOP + 2 * CENTRE + P * CELL - 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" text-anchor="middle" role="img">'
    )
    style = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="{PAPER}" stroke="{EDGE}"/>'
    title = (
        f'<text x="{WIDTH / 2:g}" y="30" font-size="16" fill="{INK}">Queries stay. Keys and values travel: after three hops, '
        "every query has met every key.</text>"
    )
    parts = [head, f"<title>{name}</title>", f"<desc>{words}</desc>", style, title]
    met: set[tuple[int, int]] = set()
    for frame in steps:
        met |= {(rank, held) for rank, held in enumerate(frame.held) if held is not None}
        parts += _panel(frame.step, list(frame.held), met, last=frame is steps[-1])
    legend = "below each ring: which queries (rows) have met the keys and values of which rank (columns)"
    parts.append(f'<text x="{WIDTH / 2:g}" y="{height - 16}" fill="{QUIET}">{legend}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(step: int, held: list[int | None], met: set[tuple[int, int]], last: bool) -> Iterator[str]:
    left = 20 + step * PANEL
    x, y = left + PANEL / 2, TOP + CENTRE - 30
    yield f'<g transform="translate({x:g} {y:g})">'
    yield f'<text y="{-RADIUS - 38}" fill="{INK}" font-weight="bold">step {step}</text>'
    yield f'<circle r="{RADIUS}" fill="none" stroke="{EDGE}" stroke-width="2"/>'
    if not last:
        yield from (_arrow(rank) for rank in range(P))
    for rank, origin in enumerate(held):
        yield from _rank(rank, origin)
    yield "</g>"
    yield f'<g transform="translate({x - P * CELL / 2:g} {y + RADIUS + 66:g})">'
    yield from _pairs(met)
    yield "</g>"


def _place(rank: float, radius: float = RADIUS) -> tuple[float, float]:
    angle = 2 * math.pi * rank / P - math.pi / 2
    return round(radius * math.cos(angle), 1), round(radius * math.sin(angle), 1)


def _arrow(rank: int) -> str:
    """Return an arrow head halfway between a rank and the next one."""
    x, y = _place(rank + 0.5)
    return f'<path d="M-6,-5 L6,0 L-6,5 Z" fill="{QUIET}" transform="translate({x:g} {y:g}) rotate({360 * (rank + 0.5) / P:g})"/>'


def _rank(rank: int, origin: int | None) -> Iterator[str]:
    """Yield the K/V block that a rank holds, on the ring, and the rank's own queries inside the ring."""
    x, y = _place(rank)
    inner_x, inner_y = _place(rank, RADIUS - 34)
    if origin is not None:
        yield (
            f'<rect x="{x - BLOCK / 2:g}" y="{y - BLOCK / 2:g}" width="{BLOCK}" height="{BLOCK}" rx="7" fill="{COLOURS[origin]}"/>'
            f'<text x="{x:g}" y="{y + 5:g}" fill="#fff" font-weight="bold">KV{origin}</text>'
        )
    yield f'<text x="{inner_x:g}" y="{inner_y + 4:g}" fill="{COLOURS[rank]}" font-weight="bold">q{rank}</text>'


def _pairs(met: set[tuple[int, int]]) -> Iterator[str]:
    """Yield a square for each pair of ranks, filled if these queries (rows) have met these keys (columns)."""
    for rank in range(P):
        yield f'<text x="-12" y="{(rank + 0.5) * CELL + 4:g}" fill="{COLOURS[rank]}" font-size="11">q{rank}</text>'
        yield f'<text x="{(rank + 0.5) * CELL:g}" y="-6" fill="{COLOURS[rank]}" font-size="11">{rank}</text>'
        for origin in range(P):
            fill = COLOURS[origin] if (rank, origin) in met else "none"
            yield (
                f'<rect x="{origin * CELL + 1}" y="{rank * CELL + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="3" '
                f'fill="{fill}" stroke="{EDGE}"/>'
            )
