"""Write the errata as a Markdown page. Every number on the page is computed."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path

from ringlab.conformance.mutants import MUTANTS
from ringlab_course.catalogue import lesson
from ringlab_course.errata.collection import GROUPS
from ringlab_course.errata.entry import Entry, Values

_HEAD = """# Errata: claims about ring attention that are wrong

Wrong claims about ring attention circulate in write-ups, talks and code. Each heading below says what is true. The wrong claim, paraphrased, is
struck through under it, with what is computed instead. They are easy mistakes; we made most of them ourselves. The most costly ones come first.
"""
_FOOT = "`python -m ringlab_course.errata docs/errata.md` computes all figures and writes this page.\n"
_DRAWN = {
    "layouts": "The tokens that each rank owns under five layouts",
    "masks": "The keys that each query sees under six masks; the causal one is the lower triangle",
    "schedules": "The forward messages of eight ranks under each schedule",
}
"""The drawings of the guide that entries show, in words."""


def page(computed: Mapping[str, Values]) -> str:
    """Return the page. `computed` contains each entry's values, by the entry's title."""
    numbered = [(group, entry) for group in GROUPS for entry in group.entries]
    parts = [_HEAD, _index()]
    for number, (group, entry) in enumerate(numbered, start=1):
        if entry is group.entries[0]:
            parts.append(f"## {group.title}\n\n{group.about}\n")
        parts.append(_entry(number, entry, computed[entry.title]))
    return "\n".join([*parts, _FOOT])


def _index() -> str:
    """Return links to the groups, each with the number of its entries."""
    links = (
        f"[{group.title}](#{group.title.lower().replace(' ', '-')}) ({len(group.entries)})"
        for group in GROUPS
    )
    return " · ".join(links) + "\n"


def compute() -> dict[str, Values]:
    """Return all entries' values, by title."""
    return {entry.title: entry.compute() for group in GROUPS for entry in group.entries}


def amiss(computed: Mapping[str, Values]) -> list[str]:
    """Return the faults of all refutations, one line each, which begins with the entry's title."""
    entries = [entry for group in GROUPS for entry in group.entries]
    return [f"{each.title}: {what}" for each in entries for what in each.refuted(computed[each.title])]


def _entry(number: int, entry: Entry, values: Values) -> str:
    taught = lesson(entry.lesson)
    link = f"[{taught.id} · {taught.title}](../notebooks/{taught.slug}.ipynb)"
    parts = [
        f"### {number}. {entry.title}",
        f"✗ **Wrong claim.** ~~{entry.filled(entry.claim, values)}~~",
        f"✓ **In fact.** {entry.filled(entry.truth, values)}",
        *([f"![{_DRAWN[entry.drawing]}](guide/{entry.drawing}.svg)"] if entry.drawing else []),
        _table(entry, values),
        f"**Why it matters.** {entry.filled(entry.matters, values)} Lesson {link}.",
        "<details><summary>The computation</summary>",
        f"```python\n{source(entry)}\n```",
        *(f"```diff\n{_difference(name)}\n```" for name in entry.wrong_rings),
        *(f"```python\n{_text(name)}\n```" for name in entry.modules),
        "</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _table(entry: Entry, values: Values) -> str:
    lines = ["| | claimed | computed |", "|---|--:|--:|"]
    for figure in entry.figures:
        right = " (right)" if figure.holds else ""
        lines.append(
            f"| {figure.label} | {figure.claimed_text}{right} | {figure.shown(values[figure.key])} |"
        )
    return "\n".join(lines)


def source(entry: Entry) -> str:
    """Return the text of an entry's computation."""
    return inspect.getsource(entry.compute).strip().replace("def _", "def ", 1)


def _text(module: str) -> str:
    """Return the text of a module without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return f"# {module}\n{Path(spec.origin).read_text(encoding='utf-8').strip()}"


def _difference(name: str) -> str:
    """Return the lines in which a wrong ring differs from the plain ring."""
    return f" # ringlab.conformance.mutants:{name}, beside ringlab.plain_ring\n{MUTANTS[name].hunks}"
