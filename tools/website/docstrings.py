"""Docstrings in this project's style as Markdown: paragraphs, named rows, drawings, doctests and sections."""

from __future__ import annotations

import re
import textwrap

from .links import escape

_NAMED = re.compile(r"^((?:[a-z_]|[A-Z]\b|[A-Z]{2})\w*(?:, \w+)*): (?=\S)")
"""Matches the beginning of a named row. A capitalised word with a colon begins a sentence."""
_NEXT_NAMED = re.compile(r"(?<=\.) (?=[a-z_]\w*(?:, [a-z_]\w*)*: \S)")
"""Matches where a named row begins within a line, as in `causal: the masks. ragged: uneven lengths.`"""
_LABEL = re.compile(r"\b(Raises|Source|Returns|Yields|Args):(?=\s|$)")


def to_markdown(docstring: str) -> str:
    """Return a cleaned docstring (as `inspect.cleandoc` gives it) as Markdown."""
    return "\n\n".join(_block(block) for block in _blocks(docstring))


def first_sentence(docstring: str) -> str:
    """Return a docstring's first paragraph as Markdown, on one line for a table."""
    return escape(docstring.strip().split("\n\n")[0].replace("\n", " "))


def fenced(kind: str, text: str) -> str:
    """Return `text` as a block of code, with a fence that is longer than any fence inside."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`{3,}", text)), default=0))
    return f"{fence}{kind}\n{text}\n{fence}"


def _blocks(docstring: str) -> list[str]:
    """Return the parts between empty lines; drawings and tables that are indented are separate parts."""
    blocks = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip("\n")):
        lines: list[str] = []
        for line in paragraph.splitlines():
            if lines and _apart(line, lines):
                blocks.append("\n".join(lines))
                lines = []
            lines.append(line)
        blocks.append("\n".join(lines))
    return [block for block in blocks if block.strip()]


def _apart(line: str, before: list[str]) -> bool:
    if before[0].startswith(">>> "):
        return False  # the output of an example may be indented
    if line.startswith(">>> "):
        return True
    indented, was = line.startswith("    "), before[0].startswith("    ")
    if _NAMED.match(before[0]) and indented:
        return False  # a named row continues in the indented lines below
    if _NAMED.match(line) and before[-1].endswith(".") and not _NAMED.match(before[0]):
        return not _LABEL.match(line)  # named rows that follow a sentence
    return indented != was


def _block(block: str) -> str:
    lines = block.splitlines()
    if lines[0].startswith(">>> "):
        return fenced("pycon", block)
    if all(line.startswith("    ") for line in lines):
        return fenced("text", textwrap.dedent(block))
    if _NAMED.match(lines[0]) and not _LABEL.match(lines[0]):
        return _named(lines)
    if re.search(r"\S {3,}\S", block):  # columns that are aligned with spaces
        return fenced("text", block)
    return _labelled(escape(block))


def _named(lines: list[str]) -> str:
    """Return rows of `name: what it is` as a list; each row may continue in the lines below."""
    rows: list[str] = []
    for line in lines:
        if not rows or _NAMED.match(line) or _LABEL.match(line):
            rows.append(line)
        else:
            rows[-1] += " " + line.strip()
    texts = []
    for row in (part for whole in rows for part in _NEXT_NAMED.split(whole)):
        found = _NAMED.match(row)
        if found and not _LABEL.match(row):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            texts.append(f"- {names}: {_labelled(escape(row[found.end() :]))}")
        else:
            texts.append("\n" + _labelled(escape(row)))
    return "\n".join(texts)


def _labelled(text: str) -> str:
    return _LABEL.sub(r"**\1:**", text)
