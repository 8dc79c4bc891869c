"""Text that is not Markdown, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_SPECIAL = re.compile(r"([\\*_<>\[\]{}$#|~])")


def escape(text: str) -> str:
    """Return `text` with everything escaped that Markdown would take for markup, but code in backticks."""
    parts = _CODE.split(text)
    return "".join(part if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts))


def slug(*names: str) -> str:
    """Return the anchor of something with these names: "05.step", "adds_up" → "05-step-adds-up"."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names)


def row(*cells: str) -> str:
    """Return a row of a table; a bar inside a cell, also in code, is escaped."""
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", cell.replace("\n", " ")) for cell in cells) + " |"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table."""
    return "\n".join([row(*head), row(*["---"] * len(head)), *(row(*cells) for cells in rows)])


def toctree(pages: list[str], caption: str = "") -> str:
    """Return a hidden list of pages: what stands in the navigation beside them."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *pages, "```"])
