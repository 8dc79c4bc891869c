"""Check that the links of built pages work, and that no page loads anything from another host.

Links are read from the HTML and CSS. Requests that scripts make can be seen only in a browser (tests/site).

Other functions write Markdown: escaped text, anchors, tables and lists of pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "input": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
"""Attributes whose address a browser loads automatically."""
_PASSIVE = {"next", "prev", "index", "search", "license", "canonical", "author", "help", "up", "alternate"}
"""Kinds of `<link>` that a browser does not load."""
_IN_CSS = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")
_IN_SCRIPT = re.compile(
    r"""(?:fetch|import|importScripts|Worker|WebSocket|sendBeacon)\s*\(\s*['"]((?:\w+:)?//[^'"]+)"""
)


@dataclass
class Page(HTMLParser):
    """The anchors, links and loaded files of one page, including files that inline styles and scripts load."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    _inside: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the anchors, links and loaded files of an element."""
        found = {name: value or "" for name, value in attrs}
        self._inside = tag
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link":
            kinds = set(found.get("rel", "").split())
            (self.links if kinds & _PASSIVE else self.loads).append(found.get("href", ""))
        for name in _LOADS.get(tag, ()):
            if value := found.get(name):
                self.loads += [part.split()[0] for part in value.split(",")] if name == "srcset" else [value]
        if tag == "form" and found.get("action"):
            self.links.append(found["action"])
        if tag == "meta" and found.get("http-equiv", "").lower() == "refresh":
            self.loads.append(found.get("content", "").partition("url=")[2])
        self.loads += in_css(found.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Read the styles and scripts inside the page."""
        if self._inside == "style":
            self.loads += in_css(data)
        elif self._inside == "script":
            self.loads += _IN_SCRIPT.findall(data)

    def handle_endtag(self, tag: str) -> None:
        """End a style or a script."""
        self._inside = ""


def in_css(text: str) -> list[str]:
    """Return the addresses that a style sheet loads."""
    return [first or second for first, second in _IN_CSS.findall(text)]


def problems(folder: Path) -> list[str]:
    """Return a line for each broken link, and for each file that is not loaded from `folder` itself."""
    folder = folder.resolve()
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    found = [] if pages else [f"{folder}: no page"]
    for path, page in pages.items():
        name = path.relative_to(folder).as_posix()
        found += [f"{name}: {why}" for link in page.links if (why := _broken(link, path, pages, folder))]
        found += [f"{name}: {why}" for link in page.loads if (why := _foreign(link, path, folder))]
    for path in sorted(folder.rglob("*.css")):
        name = path.relative_to(folder).as_posix()
        loads = in_css(path.read_text(encoding="utf-8"))
        found += [f"{name}: {why}" for link in loads if (why := _foreign(link, path, folder))]
    return list(dict.fromkeys(found))


def _foreign(link: str, path: Path, folder: Path) -> str:
    """Return why a file to load is missing or outside of `folder`, or "" if it is inside."""
    parts = urlsplit(link)
    if parts.scheme == "data" or link.startswith("#"):
        return ""
    if parts.scheme or parts.netloc:
        return f"loads {link}"
    target = _target(parts.path, path)
    if folder not in target.parents:
        return f"loads {link}, outside of the pages"
    return "" if target.is_file() else f"loads {link}, which is not there"


def _broken(link: str, path: Path, pages: dict[Path, Page], folder: Path) -> str:
    """Return why a link is broken, or "" if its target exists or is on another host."""
    parts = urlsplit(link)
    if parts.scheme in ("http", "https", "mailto"):
        return ""
    if parts.scheme or parts.netloc:
        return f"links to {link}"
    target = _target(parts.path, path) if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if folder not in target.parents or not target.is_file():
        return f"links to {link}, which is not there"
    anchor = unquote(parts.fragment)
    if target.name == "play.html" and "=" in anchor:
        return ""  # a state of the playground, which ignores what it does not know
    if anchor and target in pages and anchor not in pages[target].anchors | {"top"}:
        return f"links to {link}: no such place on that page"
    return ""


def _target(link: str, path: Path) -> Path:
    return (path.parent / unquote(link)).resolve()


_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_SPECIAL = re.compile(r"([\\*_<>\[\]{}$#|~])")


def escape(text: str) -> str:
    """Return `text` with all of Markdown's special characters escaped, except in code between backticks."""
    parts = _CODE.split(text)
    return "".join(part if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts))


def slug(*names: str) -> str:
    """Return the anchor for these names: "05.step", "adds_up" → "05-step-adds-up"."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names)


def row(*cells: str) -> str:
    """Return a row of a table; vertical bars inside cells are escaped, also in code."""
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", cell.replace("\n", " ")) for cell in cells) + " |"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    return "\n".join([row(*head), row(*["---"] * len(head)), *(row(*cells) for cells in rows)])


def toctree(pages: list[str], caption: str = "") -> str:
    """Return a hidden list of pages, which appear in the navigation."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *pages, "```"])
