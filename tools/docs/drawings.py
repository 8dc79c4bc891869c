"""The drawings of the guide: layouts as strips of tokens, masks as squares, schedules as the messages of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from html import escape

import numpy as np
import torch

from ringlab import (
    Mask,
    VirtualCluster,
    contiguous,
    dealt,
    per_document,
    ring_attention,
    striped,
    zigzag,
)
from ringlab.viz.style import rank_colour

INK = "currentColor"
"""The colour of text and lines: that of the page's text, or in a file that of STYLE."""
STYLE = "<style>svg{color:#52606d}@media(prefers-color-scheme:dark){svg{color:#b4bfca}}</style>"
S, P = 16, 4
LAYOUTS = (contiguous(S, P), striped(S, P), zigzag(S, P), dealt(S, P, chunk=2), per_document((8, 8), P))
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window=4": Mask(window=4),
    "prefix=5": Mask(prefix=5),
    "documents=(6, 7, 3)": Mask(documents=(6, 7, 3)),
    "documents, window=3": Mask(documents=(6, 7, 3), window=3),
}
SCHEDULES = {
    "ring": "K, V",
    "bidirectional": "K, V, half each way",
    "multi-ring": "K, V, heads by stride",
    "double-ring(node=4)": "K, V",
    "allgather": "K, V, all at once",
    "ulysses": "q, k, v and out",
    "hybrid(ulysses=2)": "q, k, v, out; then K, V",
    "query-ring": "queries and partials",
}
"""The schedules that are drawn, each with what travels forward. Burst's forward is that of a ring."""
NARROW, SHOWN = 384, 480
"""The width of a drawing whose text can be read on a phone, and the pixels that it takes where there is room."""
RANKS = 8
SIDE = 206
"""The width of a ring with its words."""


def drawings() -> Iterator[tuple[str, str]]:
    """Yield (file, SVG) for each drawing."""
    yield "docs/guide/layouts.svg", layouts()
    yield "docs/guide/masks.svg", masks()
    yield "docs/guide/schedules.svg", schedules()


def layouts() -> str:
    """Return each layout as a strip of tokens in the colours of their ranks, with each rank's causal pairs beside it."""
    cell, bars = 17, 17 * S + 14
    parts = [rect(76 * rank, 2, 14, 14, rank) + text(76 * rank + 20, 14, f"rank {rank}", size=13) for rank in range(P)]  # fmt: skip
    each = [[int((layout.positions(rank) + 1).sum()) for rank in range(P)] for layout in LAYOUTS]
    for row, (layout, pairs) in enumerate(zip(LAYOUTS, each, strict=True)):
        y = 52 + row * 56
        span = f"{pairs[0]} pairs each" if len({*pairs}) == 1 else f"{min(pairs)} to {max(pairs)} pairs"
        parts += [text(0, y - 6, layout.name, size=13), text(bars, y - 6, span, size=13)]
        for rank in range(P):
            parts += [rect(token * cell, y, cell - 1, 27, rank) for token in layout.positions(rank)]
            parts.append(rect(bars, y + 7 * rank, 98 * pairs[rank] / max(map(max, each)), 6, rank))
    words = "; ".join(f"{each.name}: rank 0 owns {each.positions(0).tolist()}" for each in LAYOUTS)
    return svg(NARROW, 30 + 56 * len(LAYOUTS), words, parts, shown=SHOWN)


def masks() -> str:
    """Return each mask as a square of queries, downwards, and keys."""
    cell, width = 7, NARROW // 3
    parts = []
    for column, (name, mask) in enumerate(MASKS.items()):
        x, y = column % 3 * width, 20 + column // 3 * (7 * S + 44)
        visible = mask.visible(np.arange(S), np.arange(S))
        lines = name.replace("=(", "= (").split(" ", 1)
        parts += [text(x, y - 6 - 16 * above, line, size=13) for above, line in enumerate(reversed(lines))]
        parts.append(f'<rect x="{x}" y="{y}" width="{cell * S}" height="{cell * S}" fill="none" stroke="{INK}" stroke-width=".6"/>')  # fmt: skip
        cells = "".join(f"M{x + cell * j} {y + cell * i}h{cell - 1}v{cell - 1}h{1 - cell}z" for i, j in np.argwhere(visible))  # fmt: skip
        parts.append(f'<path d="{cells}" fill="#0072B2"/>')
    return svg(NARROW, 2 * 7 * S + 66, "Keys, to the right, that each query, downwards, sees: " + ", ".join(MASKS), parts, shown=SHOWN)  # fmt: skip


def schedules() -> str:
    """Return the forward messages of each schedule on eight ranks, from the trace of a run."""
    parts = [marker()]
    for number, (_, inside) in enumerate(rings()):
        x, y = number % 4 * SIDE, number // 4 * (SIDE + 34)
        parts.append(f'<g transform="translate({x} {y})">{inside}</g>')
    return svg(4 * SIDE, 2 * (SIDE + 34), "Forward messages of eight ranks under " + ", ".join(SCHEDULES), parts)  # fmt: skip


def rings() -> Iterator[tuple[str, str]]:
    """Yield (schedule, drawing) for each drawing of `schedules`, SIDE wide and SIDE + 34 high."""
    for name, what in SCHEDULES.items():
        words = text(SIDE / 2, SIDE + 4, name, "middle", 15), text(SIDE / 2, SIDE + 22, what, "middle", 13)
        yield name, "".join([*words, *ring_of(SIDE / 2, SIDE / 2, sent_by(name))])


def linked_schedules() -> str:
    """Return the drawing of `schedules` as a grid for the site: as many columns as fit, each ring a link to #NAME."""
    view = f'viewBox="0 0 {SIDE} {SIDE + 34}" font-family="sans-serif"'
    links = (
        f'<a href="#{anchor(name)}"><svg {view} role="img" aria-label="{escape(name)}">{inside}</svg></a>'
        for name, inside in rings()
    )
    hidden = f'<svg width="0" height="0" aria-hidden="true">{marker()}</svg>'
    return f'<div class="drawings">{hidden}\n' + "\n".join(links) + "\n</div>"


def anchor(schedule: str) -> str:
    """Return the anchor of a schedule on its page."""
    return f"schedule-{schedule.partition('(')[0]}"


def sent_by(schedule: str) -> Counter[tuple[int, int]]:
    """Return the bytes from each rank to each other one, forward."""
    layout = contiguous(8 * RANKS, RANKS)
    q, k, v = (torch.zeros(1, RANKS, layout.S, 4) for _ in range(3))

    def program(ring):  # type: ignore[no-untyped-def]
        shards = (layout.shard(x, ring.rank) for x in (q, k, v))
        return ring_attention(*shards, ring=ring, layout=layout, causal=False, schedule=schedule)

    found: Counter[tuple[int, int]] = Counter()
    for event in VirtualCluster(RANKS).run(program).trace.exchanges():
        if event.to is not None and not event.tag.startswith("control"):
            found[event.rank, event.to] += event.bytes_sent
    return found


def ring_of(x: float, y: float, sent: Counter[tuple[int, int]]) -> Iterator[str]:
    """Yield a ring of ranks around (x, y), with an arrow for each pair of ranks between which bytes are sent."""
    at: Callable[[float], tuple[float, float]] = lambda rank: (  # noqa: E731
        x + 80 * math.sin(2 * math.pi * rank / RANKS),
        y - 80 * math.cos(2 * math.pi * rank / RANKS),
    )
    most = max(sent.values())
    for (source, to), count in sent.items():
        (x1, y1), (x2, y2) = at(source), at(to)
        long = math.hypot(x2 - x1, y2 - y1)
        dx, dy = (x2 - x1) / long, (y2 - y1) / long
        side = 2.5  # so that the arrows between two ranks, one each way, do not hide each other
        points = x1 + 11 * dx - side * dy, y1 + 11 * dy + side * dx, x2 - 14 * dx - side * dy, y2 - 14 * dy + side * dx  # fmt: skip
        a, b, c, d = (f"{each:.1f}" for each in points)
        yield f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" stroke="{INK}" stroke-width="{0.5 + 1.3 * count / most:.1f}" marker-end="url(#tip)"/>'
    for rank in range(RANKS):
        cx, cy = at(rank)
        yield f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="9" fill="{rank_colour(rank)}"/>'


def marker() -> str:
    """Return the definition of the arrows' tips, once for each drawing."""
    return f'<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker></defs>'


def rect(x: float, y: float, width: float, height: float, rank: int) -> str:
    """Return a rectangle in a rank's colour."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" fill="{rank_colour(rank)}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    """Return a line of text; `anchor` is its start, middle or end."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{INK}">{escape(words)}</text>'


def svg(width: float, height: float, words: str, parts: list[str], shown: float | None = None) -> str:
    """Return the drawing with a description in words; `shown` is its width in pixels, `width` unless given."""
    inside = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{shown or width:g}" font-family="sans-serif" role="img" aria-label="{escape(words)}">\n{STYLE}\n{inside}\n</svg>\n'
