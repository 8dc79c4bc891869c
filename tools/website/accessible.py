"""Small corrections of the HTML of Sphinx and its theme, for people who use a screen reader.

tests/site/test_accessible.py checks the pages with axe-core.
"""

from __future__ import annotations

import re
from pathlib import Path

_CAPTION = 'class="caption" role="heading"'
_DRAWERS = {'<aside class="sidebar-drawer">': "All pages", '<aside class="toc-drawer">': "On this page"}
_RESULTS = '<div id="search-results"></div>'
_EMPTY_HEAD = re.compile(r"<th class=\"head[^\"]*\">(?:<p>\s*</p>)?</th>")
_PARAMETERS = re.compile(r"<dl>\n((?:<dd><em class=\"sig-param\">.*</dd>\n)+)</dl>")


def mend(folder: Path) -> None:
    """Correct every page of the built site.

    Raises: ValueError if no page contains the text of a correction: a new version of Sphinx or of its theme
    then writes other HTML.
    """
    pages = {page: page.read_text(encoding="utf-8") for page in folder.rglob("*.html")}
    for sign in (_CAPTION, *_DRAWERS, _RESULTS):
        if not any(sign in text for text in pages.values()):
            raise ValueError(f"needed: a page with {sign}\n   got: none of {len(pages)}")
    for pattern in (_EMPTY_HEAD, _PARAMETERS):
        if not any(pattern.search(text) for text in pages.values()):
            raise ValueError(f"needed: a page with {pattern.pattern}\n   got: none of {len(pages)}")
    for page, text in pages.items():
        page.write_text(mended(text), encoding="utf-8")


def mended(html: str) -> str:
    """Return a page with labelled side columns, levels of captions, a search heading, and correct lists."""
    html = html.replace(_CAPTION, f'{_CAPTION} aria-level="2"')
    for drawer, name in _DRAWERS.items():
        html = html.replace(drawer, f'{drawer[:-1]} aria-label="{name}">')
    html = html.replace(_RESULTS, f"<h1>Search</h1>\n{_RESULTS}")
    html = _EMPTY_HEAD.sub("<td></td>", html)
    return _PARAMETERS.sub(_as_list, html)


def _as_list(found: re.Match[str]) -> str:
    """Return the parameters of a signature as a list, because Sphinx writes descriptions without terms."""
    lines = found[1].replace("<dd>", '<div role="listitem">').replace("</dd>", "</div>")
    return f'<div class="sig-lines" role="list">\n{lines}</div>'
