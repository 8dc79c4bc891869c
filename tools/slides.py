"""Makes slides from a Markdown page: `python tools/slides.py docs/labs.md build/slides.html`.

Each section of the page becomes one or several slides, because content that does not fit continues on the
next slide. A table, a list or a block of commands is never split, and stays with the line that announces it.
The result is one file without scripts that loads nothing. It scrolls from slide to slide, and prints one
slide per page.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

LINES = 13
"""The lines of text that fit on a slide below its heading, at the size of the style below."""
_WIDTH = 88
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --paper: #fff; --rule: #cbd2d9; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #14191f; --rule: #3e4c59; --accent: #56b4e9; } }
* { box-sizing: border-box; } html { scroll-snap-type: y mandatory; background: var(--paper); color: var(--ink); }
body { margin: 0; font: 2.1vw/1.45 system-ui, sans-serif; }
section { height: 100vh; padding: 5vh 7vw; scroll-snap-align: start; overflow: hidden; position: relative; border-bottom: 1px solid var(--rule); }
h1 { font-size: 3.6vw; margin: 0 0 3vh; color: var(--accent); } p, ul { margin: 0 0 2.2vh; }
table { border-collapse: collapse; width: 100%; font-size: 1.5vw; } th, td { text-align: left; vertical-align: top; padding: 0.5vh 1vw 0.7vh 0; border-bottom: 1px solid var(--rule); }
pre { font: 1.5vw/1.5 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; border-left: 0.4vw solid var(--accent); padding-left: 1.2vw; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 0.92em; } footer { position: absolute; right: 3vw; bottom: 2vh; font-size: 1.2vw; opacity: 0.7; }
@media print { @page { size: 13.33in 7.5in; margin: 0; } section { height: 7.5in; break-after: page; border: 0; } }
"""


def slides(text: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, HTML) of each slide of a Markdown page."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    heading, lines = "", 0
    begun: list[list[Token]] = []
    for tokens in _together(_blocks(parser.parse(text))):
        if tokens[0].type == "heading_open":
            if begun:
                yield heading, _rendered(parser, begun)
            heading, begun, lines = tokens[1].content, [], 0
            continue
        takes = _lines(tokens)
        if begun and lines + takes > LINES:
            yield heading, _rendered(parser, begun)
            begun, lines = [], 0
        begun.append(tokens)
        lines += takes
    if begun:
        yield heading, _rendered(parser, begun)


def _blocks(tokens: list[Token]) -> Iterator[list[Token]]:
    """Yield the tokens of each block of the page: a heading, paragraph, table, list or code."""
    block: list[Token] = []
    depth = 0
    for token in tokens:
        block.append(token)
        depth += token.nesting
        if depth == 0:
            yield block
            block = []


def _together(blocks: Iterator[list[Token]]) -> Iterator[list[Token]]:
    """Yield the blocks, each joined with the paragraph before it if that ends with a colon."""
    held: list[Token] = []
    for block in blocks:
        if block[0].type == "heading_open" and held:
            yield held
            held = []
        whole = held + block
        announces = block[0].type == "paragraph_open" and block[1].content.endswith(":")
        held = whole if announces else []
        if not announces:
            yield whole
    if held:
        yield held


def _lines(tokens: list[Token]) -> int:
    """Return about how many lines a block takes on a slide, with the paragraph that announces it."""
    if tokens[0].type == "paragraph_open" and len(tokens) > 3:
        return _lines(tokens[:3]) + _lines(tokens[3:])
    if tokens[0].type == "fence":
        return tokens[0].content.count("\n") + 1
    if tokens[0].type == "table_open":
        rows = sum(token.type == "tr_open" for token in tokens)
        return rows + sum(len(token.content) // _WIDTH for token in tokens if token.type == "inline")
    return 1 + sum(1 + len(token.content) // _WIDTH for token in tokens if token.type == "inline")


def _rendered(parser: MarkdownIt, blocks: list[list[Token]]) -> str:
    tokens = [token for block in blocks for token in block]
    return str(parser.renderer.render(tokens, parser.options, {}))


def deck(text: str) -> str:
    """Return the slides of a Markdown page as one HTML file."""
    shown = list(slides(text))
    sections = [
        f"<section><h1>{html.escape(heading)}</h1>{body}<footer>{number} / {len(shown)}</footer></section>"
        for number, (heading, body) in enumerate(shown, start=1)
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(shown[0][0])}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{_STYLE}</style></head>'
        f"<body>{''.join(sections)}</body></html>\n"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(deck(source.read_text(encoding="utf-8")), encoding="utf-8")
    print(target)
