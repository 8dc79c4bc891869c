"""Makes slides from a Markdown page: `python -m tools.slides tools/slides.md build/slides.html`.

Each heading begins a slide. `![name](picture)` stands for a drawing of this module. The result is one file
without scripts that loads nothing. It scrolls from slide to slide, and prints one slide per page.
"""

from __future__ import annotations

import html
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from tools.docs.drawings import INK, LAYOUTS, RANKS, S, marker, rect, ring_of, svg, text

CELL = 22
"""The width of a token."""
BLUE, ORANGE, GREEN = 4, 0, 2
"""The ranks whose colours stand for computing, for a message, and for both."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --paper: #fff; --rule: #cbd2d9; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #14191f; --rule: #3e4c59; --accent: #56b4e9; } }
* { box-sizing: border-box; } html { scroll-snap-type: y mandatory; background: var(--paper); color: var(--ink); }
body { margin: 0; font: 2.2vw/1.4 system-ui, sans-serif; }
section { height: 100vh; padding: 5vh 7vw; scroll-snap-align: start; overflow: hidden; position: relative; border-bottom: 1px solid var(--rule); }
h1 { font-size: 3.6vw; margin: 0 0 3vh; color: var(--accent); } p, ul { margin: 0 0 2vh; }
svg { display: block; width: auto; height: 44vh; max-width: 100%; margin: 0 auto 4vh; }
code { font: 0.92em ui-monospace, "DejaVu Sans Mono", monospace; } footer { position: absolute; right: 3vw; bottom: 2vh; font-size: 1.2vw; }
@media print { @page { size: 13.33in 7.5in; margin: 0; } section { height: 7.5in; break-after: page; border: 0; } }
"""


def _bars(words: str, rows: Sequence[tuple[str, float, float, int]]) -> str:
    """Return bars of time: each row has a label, where it begins and ends, and its colour."""
    parts = []
    for number, (label, begin, end, colour) in enumerate(rows):
        y = 10 + 34 * number
        parts += [text(96, y + 17, label, "end"), rect(104 + begin, y, end - begin, 24, colour)]
    return svg(400, 34 * len(rows) + 12, words, parts)


def _ring() -> str:
    sent = Counter({(rank, (rank + 1) % RANKS): 1 for rank in range(RANKS)})
    return svg(
        160, 160, "Eight ranks in a ring, each of which sends to the next", [marker(), *ring_of(80, 80, sent)]
    )


def _hop() -> str:
    rows = [
        ("compute", 0, 130, BLUE),
        ("message", 0, 80, ORANGE),
        ("compute", 132, 262, BLUE),
        ("message", 132, 212, ORANGE),
    ]
    return _bars("A rank computes on a block while the next one arrives", rows)


def _block() -> str:
    parts = [
        rect(120, 10, 110, 110, BLUE),
        text(112, 70, "c queries", "end"),
        text(175, 138, "c keys", "middle"),
    ]
    parts += [
        rect(270, 10, 24, 110, ORANGE),
        rect(300, 10, 24, 110, ORANGE),
        text(282, 138, "K", "middle"),
        text(312, 138, "V", "middle"),
    ]
    return svg(
        400, 145, "A block of c × c scores, and the K and V of c tokens", [*parts, text(332, 70, "c tokens")]
    )


def _axes() -> str:
    lines = f'<path d="M90 8V118H360" fill="none" stroke="{INK}" stroke-width="1.5"/>'
    return svg(
        400,
        145,
        "Empty axes: GB/s over bytes",
        [
            lines,
            text(80, 16, "GB/s", "end"),
            text(360, 136, "bytes of a message", "end"),
            text(225, 68, "?", "middle", 40),
        ],
    )


def _overlap() -> str:
    rows = [("compute", 0, 150, BLUE), ("exchange", 0, 90, ORANGE), ("both", 0, 150, GREEN)]
    return _bars("Three times: computing, exchanging, and both at once", rows).replace(
        "</svg>", text(262, 95, "?", size=20) + "</svg>"
    )


def _heads() -> str:
    parts = [rect(110 + 24 * head, 30, 20, 34, BLUE) for head in range(8)] + [
        text(102, 52, "query heads", "end")
    ]
    parts += [rect(110 + 96 * head, 84, 92, 34, ORANGE) for head in range(2)] + [
        text(102, 106, "K/V heads", "end")
    ]
    return svg(400, 140, "Eight query heads share two key and value heads", parts)


def _strips() -> str:
    parts = []
    for row, layout in enumerate(LAYOUTS[:3]):
        y = 10 + row * 40
        parts.append(text(110, y + 19, layout.name, "end"))
        parts += [
            rect(120 + token * CELL, y, CELL - 1, 28, rank)
            for rank in range(layout.P)
            for token in layout.positions(rank)
        ]
    return svg(130 + S * CELL, 130, "Tokens in the colours of their ranks, under three layouts", parts)


def _efficiency() -> str:
    return _bars(
        "The time of a perfect split, and the longer time of a ring",
        [("perfect split", 0, 150, GREEN), ("ring", 0, 210, BLUE)],
    )


def _scaling() -> str:
    parts = []
    for row, (label, widths) in enumerate((("strong", (60, 30)), ("weak", (60, 60)))):
        y = 10 + 64 * row
        parts.append(text(96, y + 28, label, "end"))
        for column, (ranks, width) in enumerate(zip((2, 4), widths, strict=True)):
            x = 110 + 150 * column if not row or not column else 250
            parts += [rect(x + (width + 2) * rank, y, width, 40, rank) for rank in range(ranks)]
    return svg(
        520,
        130,
        "Strong: the same sequence on two and on four ranks. Weak: the same share of each rank",
        parts,
    )


PICTURES: dict[str, Callable[[], str]] = {
    "ring": _ring, "hop": _hop, "block": _block, "axes": _axes, "overlap": _overlap, "heads": _heads, "strips": _strips,
    "efficiency": _efficiency, "scaling": _scaling,
}  # fmt: skip


def deck(page: str) -> str:
    """Return the slides of a Markdown page as one HTML file. Raises: KeyError for an unknown picture."""
    parser = MarkdownIt("commonmark", {"html": False})
    slides = [slide.partition("\n") for slide in re.split(r"^# ", page, flags=re.M)[1:]]
    sections = []
    for number, (heading, _, body) in enumerate(slides, start=1):
        shown = re.sub(
            r'<p><img src="picture" alt="(\w+)" /></p>',
            lambda found: PICTURES[found[1]](),
            parser.render(body),
        )
        footer = f"<footer>{number} / {len(slides)}</footer>"
        sections.append(f"<section><h1>{html.escape(heading)}</h1>{shown}{footer}</section>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(slides[0][0])}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{_STYLE}</style></head>'
        f"<body>{''.join(sections)}</body></html>\n"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(deck(source.read_text(encoding="utf-8")), encoding="utf-8")
    print(target)
