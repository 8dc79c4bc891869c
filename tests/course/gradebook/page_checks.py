"""A reader that parses pages as a browser would, and reports their faults."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

_VOID = {"meta", "br", "link", "img", "input", "hr"}
_BLOCKS = {
    "td",
    "th",
    "tr",
    "p",
    "div",
    "li",
    "caption",
    "dd",
    "dt",
    "h1",
    "h2",
    "h3",
    "h4",
    "section",
    "summary",
}
_ADDRESSES = ("src", "href", "action", "data", "srcset", "poster", "background", "formaction", "cite", "ping")
_OFFLINE = re.compile(r"#|learners/[a-z0-9-]+\.html$")


@dataclass
class Element:
    """One element: its name, its attributes, and the text in it and in its descendants."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """A parsed page: its elements in the order of the file, and all text that a reader sees."""

    source: str
    elements: list[Element] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[Element] = []
        self.misplaced: list[str] = []
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", self.text)
        self.misplaced += [f"{element.tag} is never closed" for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {key: value or "" for key, value in attrs}))
        if tag not in _VOID:
            self._open.append(self.elements[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].tag != tag:
            self.misplaced.append(f"</{tag}> inside {[element.tag for element in self._open[-2:]]}")
            return
        if tag in _BLOCKS:
            self.handle_data(" ")
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if not any(element.tag in ("style", "script") for element in self._open):
            self.text += data
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        """Return all elements with this tag name."""
        return [element for element in self.elements if element.tag == tag]


def faults(source: str) -> list[str]:
    """Return a page's faults: code that runs, links to elsewhere, parts that some readers cannot use."""
    page = Page(source)
    return [*_unsafe(page), *_unusable(page)]


def _unsafe(page: Page) -> list[str]:
    found = [f"a {e.tag} element" for e in page.elements if e.tag in ("script", "iframe", "object", "embed", "form", "base", "link", "img")]  # fmt: skip
    for element in page.elements:
        for key, value in element.attributes.items():
            if key.startswith("on") or key in ("style", "srcdoc"):
                found.append(f"{key}= on {element.tag}")
            if key in _ADDRESSES and not _OFFLINE.match(value):
                found.append(f"{element.tag} {key}={value[:80]}")
            if "javascript:" in value.lower() or re.search(r"url\((?!#)", value):
                found.append(f"{element.tag} {key}={value[:80]}")
    policies = [e.attributes.get("content", "") for e in page.all("meta") if e.attributes.get("http-equiv") == "Content-Security-Policy"]  # fmt: skip
    if not policies or "default-src 'none'" not in policies[0] or "unsafe" in policies[0]:
        found.append(f"the policy {policies}")
    styles = page.all("style")
    if len(styles) != 1 or re.search(r"@import|url\(", styles[0].text):
        found.append("a style that is not the page's own")
    if re.search(
        "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]", page.source
    ):
        found.append("a character that steers")
    return found


def _unusable(page: Page) -> list[str]:
    found = list(page.misplaced)
    if [e.tag for e in page.elements].count("h1") != 1:
        found.append("not one h1")
    levels = [int(e.tag[1]) for e in page.elements if re.fullmatch("h[1-6]", e.tag)]
    found += [f"h{b} after h{a}" for a, b in pairwise(levels) if b > a + 1]
    found += ["a th without scope" for e in page.all("th") if e.attributes.get("scope") not in ("col", "row")]
    if len(page.all("caption")) != len(page.all("table")):
        found.append("a table without a caption")
    for svg in page.all("svg"):
        hidden = svg.attributes.get("aria-hidden") == "true"
        if not hidden and not (svg.attributes.get("role") == "img" and svg.attributes.get("aria-label")):
            found.append("a picture without words")
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    found += [f"id {name} twice" for name in set(ids) if ids.count(name) > 1]
    aims = [
        e.attributes[k][1:]
        for e in page.elements
        for k in ("href",)
        if e.attributes.get(k, "").startswith("#")
    ]
    found += [f"no #{aim}" for aim in set(aims) - set(ids)]
    if not page.all("html")[0].attributes.get("lang"):
        found.append("no language")
    return found
