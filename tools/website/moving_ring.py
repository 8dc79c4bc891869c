"""The picture of the first page: a ring of four ranks at work, drawn from the trace of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ringlab import VirtualCluster, contiguous, ring_attention
from ringlab.viz.style import PALETTE
from ringlab_course.figures.ring_view import Frame, frames

P = 4
SHARE = 20
"""Percent of the loop that one step takes; the end is shown in the remaining time."""
STAY = 12
"""Percent of the loop for which a block stays at a rank before it moves on."""
RADIUS, SIDE, CELL = 78, 26, 34


def picture() -> str:
    """Return HTML with an SVG that is animated by CSS alone, and still for readers who prefer less motion."""
    steps = run()
    words = " ".join(frame.describe() for frame in steps)
    parts = [*_ranks(), *_blocks(), *_coverage(steps)]
    return (
        f"<style>{''.join(_rules(steps))}</style>\n"
        f'<svg class="moving-ring" viewBox="0 0 440 236" role="img" aria-label="{words}">{"".join(parts)}</svg>'
    )


def run() -> list[Frame]:
    """Return the steps of ring attention without a mask on four virtual ranks, from the run's trace."""
    layout = contiguous(S=4 * P, P=P)
    q, k, v = (torch.ones(1, 1, layout.S, 4) for _ in range(3))

    def program(ring):  # type: ignore[no-untyped-def]
        shards = (layout.shard(x, ring.rank) for x in (q, k, v))
        return ring_attention(*shards, ring=ring, layout=layout, causal=False)

    return frames(VirtualCluster(P).run(program).trace)


def _place(rank: int, radius: float = RADIUS) -> tuple[float, float]:
    angle = 2 * math.pi * rank / P - math.pi / 2
    return round(112 + radius * math.cos(angle), 1), round(112 + radius * math.sin(angle), 1)


def _ranks() -> Iterator[str]:
    yield f'<circle class="way" cx="112" cy="112" r="{RADIUS}"/>'
    for rank in range(P):
        x, y = _place(rank)
        yield f'<circle class="rank" cx="{x}" cy="{y}" r="27"/>'
        label_x, label_y = _place(rank, RADIUS - 56 if rank % 2 else RADIUS - 36)
        yield f'<text x="{label_x}" y="{label_y + 4}">rank {rank}</text>'


def _blocks() -> Iterator[str]:
    for origin in range(P):
        yield (
            f'<g class="block b{origin}"><rect x="{-SIDE / 2}" y="{-SIDE / 2}" width="{SIDE}" height="{SIDE}" rx="5" '
            f'fill="{PALETTE[origin]}"/><text class="on" y="4">{origin}</text></g>'
        )


def _coverage(steps: list[Frame]) -> Iterator[str]:
    left, top = 290, 52
    yield f'<text x="{left + P * CELL / 2}" y="20">keys and values of rank</text>'
    yield f'<text x="{left - 34}" y="{top - 12}">queries of</text>'
    for rank in range(P):
        yield f'<text x="{left + (rank + 0.5) * CELL}" y="{top - 12}">{rank}</text>'
        yield f'<text x="{left - 34}" y="{top + (rank + 0.5) * CELL + 4}">rank {rank}</text>'
        for origin in range(P):
            x, y = left + origin * CELL, top + rank * CELL
            yield f'<rect class="cell" x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>'
    for frame in steps:
        for rank in frame.computed:
            held = frame.held[rank]
            if held is not None:
                x, y = left + held * CELL, top + rank * CELL
                yield (
                    f'<g class="met s{frame.step}"><rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}" '
                    f'rx="4" fill="{PALETTE[held]}"/><text class="on" x="{x + CELL / 2}" y="{y + CELL / 2 + 4}">'
                    f"{frame.step}</text></g>"
                )
    yield f'<text x="{left + P * CELL / 2}" y="{top + P * CELL + 22}">the step in which they met</text>'


def _rules(steps: list[Frame]) -> Iterator[str]:
    for origin in range(P):
        turn = steps[0].held.index(origin)
        stops = []
        for frame in steps:
            turn += (frame.held.index(origin) - turn) % P  # always forwards around the ring
            stops += [(frame.step * SHARE, _turned(turn)), (frame.step * SHARE + STAY, _turned(turn))]
        last = stops[-1][1]
        text = "".join(f"{percent}%{{{where};opacity:1}}" for percent, where in stops)
        yield f"@keyframes b{origin}{{{text}96%{{{last};opacity:1}}100%{{{last};opacity:0}}}}"
        yield f".moving-ring .b{origin}{{{last};animation:b{origin} 12s linear infinite}}"
    for frame in steps:
        begin = frame.step * SHARE
        hidden = f"0%,{begin}%{{opacity:0}}" if begin else "0%{opacity:0}"
        yield f"@keyframes s{frame.step}{{{hidden}{begin + 4}%,96%{{opacity:1}}100%{{opacity:0}}}}"
        yield f".moving-ring .s{frame.step}{{animation:s{frame.step} 12s linear infinite}}"
    yield "@media (prefers-reduced-motion:reduce){.moving-ring *{animation:none!important}}"


def _turned(quarters: int) -> str:
    """Return CSS for a block's place on the ring.

    Between two places the block moves along the circle, upright.
    """
    angle = quarters * 360 / P
    return (
        f"transform:translate(112px,112px) rotate({angle:g}deg) translateY(-{RADIUS}px) rotate({-angle:g}deg)"
    )
