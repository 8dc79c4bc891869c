"""axe-core finds no violation on pages of each kind, light or dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import targets
from tools.browser import Window

pytestmark = pytest.mark.thorough

ROOT = find_root()
NOTEBOOKS = [target for target in targets(ROOT) if target.kind in ("lesson", "exercise")]
OF_NOTEBOOKS = [f"{target.path.parent.name}/{target.slug}.html" for target in NOTEBOOKS]
OF_DOCUMENTS = [
    path.relative_to(ROOT).with_suffix(".html").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))
]
OTHERS = [
    "index.html",
    "play.html",
    "five-minutes.html",
    "errors.html",
    "docs/errata.html",
    "source/ringlab.layout.html",
    "search.html",
    "genindex.html",
    "api/ringlab.html",
    "exercises/index.html",
    "misconceptions/index.html",
    "misconceptions/05_emulated_ring.html",
]
COLOURS: dict[str, Any] = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
"""The rules that depend on colours; dark changes nothing else."""


def violations(browser: Window, page: Path) -> list[str]:
    """Return the violations that axe-core finds on a page, each with its first place."""
    told = []
    schemes: tuple[tuple[Any, dict[str, Any]], ...] = ("light", {}), ("dark", COLOURS)
    for scheme, rules in schemes:
        browser.page.emulate_media(color_scheme=scheme)
        browser.page.goto(page.as_uri())
        found = Axe().run(browser.page, options={"resultTypes": ["violations"], **rules}).response
        told += [f"{each['id']}, {scheme}: {each['nodes'][0]['html'][:200]}" for each in found["violations"]]
    browser.page.emulate_media(color_scheme="light")
    return told


@pytest.mark.needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHERS, *OF_NOTEBOOKS[::6], *OF_DOCUMENTS[::6]])
def test_a_page_can_be_listened_to(site: Path, browser: Window, name: str) -> None:
    assert violations(browser, site / name) == []
