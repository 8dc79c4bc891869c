"""A matplotlib figure as a piece of a page: no style but attributes, colours that follow light and dark.

A page allows its one style sheet by its hash and nothing else, so what matplotlib writes as `style="…"`
becomes attributes, and its style element, metadata and namespaces go.
"""

from __future__ import annotations

import io
import itertools
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from markupsafe import Markup

from ringlab.viz.style import BLUE, GREY, INK, ORANGE, PAPER, QUIET, RED, RULE, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THEMED = {
    INK: "var(--ink)",
    QUIET: "var(--quiet)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    BLUE: "var(--good)",
    RED: "var(--bad)",
    GREY: "var(--none)",
    ORANGE: "var(--warn)",
}
_COLOURS = {colour.lower(): themed for colour, themed in _THEMED.items()}


def inline_svg(figure: Figure, alt: str, prefix: str) -> Markup:
    """Return the figure as an SVG element with `alt` as its text; `prefix` sets its ids apart from others'.

    Raises: ValueError if `alt` is empty: say what the figure shows, not that it is a figure.
    """
    import matplotlib

    if not alt.strip():
        raise ValueError("alt: say in words what the figure shows")
    buffer = io.BytesIO()
    with styled(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    names = _new_ids(root, prefix)
    for element in root.iter():
        _made_plain(element, names)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("metadata", "style"):
                parent.remove(child)
    width, height = root.attrib["viewBox"].split()[2:]
    root.attrib.clear()
    root.attrib.update(
        {"class": "figure", "role": "img", "aria-label": alt, "viewBox": f"0 0 {width} {height}"}
    )
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _new_ids(root: ElementTree.Element, prefix: str) -> dict[str, str]:
    """Return a new id for every id that something refers to."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#(\w+)', text))
    return {old: f"{prefix}-{number}" for number, old in zip(itertools.count(1), used, strict=False)}


def _made_plain(element: ElementTree.Element, names: dict[str, str]) -> None:
    element.tag = element.tag.rpartition("}")[2]
    given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    for declaration in filter(None, given.pop("style", "").split(";")):
        key, _, value = declaration.partition(":")
        if key.strip() != "font-family":
            given[key.strip()] = _COLOURS.get(value.strip(), value.strip())
    if given.get("fill") in _COLOURS:
        given["fill"] = _COLOURS[given["fill"]]
    if (old := given.pop("id", None)) in names:
        given["id"] = names[old]
    element.attrib.clear()
    for key, value in given.items():
        renamed = re.sub(r"#(\w+)", lambda found: f"#{names.get(found[1], found[1])}", value)
        element.attrib[key] = (
            re.sub(r"(\d+\.\d\d)\d+", r"\1", renamed) if "." in renamed else value and renamed
        )
    element.tail = None if element.tail is None or not element.tail.strip() else element.tail
    element.text = None if element.text is None or not element.text.strip() else element.text
