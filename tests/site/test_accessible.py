"""axe-core finds no violation, light or dark: each run tests one page of each kind and a part of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import targets
from tests.browser.window import Window

pytestmark = pytest.mark.thorough

ROOT = find_root()
NOTEBOOKS = [target for target in targets(ROOT) if target.kind in ("lesson", "exercise")]
OF_NOTEBOOKS = [f"{target.path.parent.name}/{target.slug}.html" for target in NOTEBOOKS]
OF_DOCUMENTS = [
    path.relative_to(ROOT).with_suffix(".html").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))
]
KINDS = [
    "index.html",
    "play.html",
    "errors.html",
    "search.html",
    "genindex.html",
    "api/ringlab.html",
    "exercises/index.html",
    "exercises/05_emulated_ring.html",
    "misconceptions/index.html",
    "misconceptions/05_emulated_ring.html",
    "notebooks/05_emulated_ring.html",
    "docs/kill-matrix.html",
    "docs/guide/index.html",
]
"""One page of each kind."""


def violations(browser: Window, page: Path, scheme: Any) -> list[str]:
    """Return the violations that axe-core finds on a page, each with its first place."""
    browser.page.emulate_media(color_scheme=scheme)
    browser.page.goto(page.as_uri())
    found = Axe().run(browser.page, options={"resultTypes": ["violations"]}).response["violations"]
    browser.page.emulate_media(color_scheme="light")
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


@pytest.mark.needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_of_each_kind_can_be_listened_to(site: Path, browser: Window, name: str, scheme: str) -> None:
    assert violations(browser, site / name, scheme) == []


@pytest.mark.needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*OF_NOTEBOOKS, *OF_DOCUMENTS} - {*KINDS}))
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_can_be_listened_to(site: Path, browser: Window, name: str, scheme: str) -> None:
    assert violations(browser, site / name, scheme) == []


@pytest.mark.needs_chromium
def test_a_picture_without_words_is_noticed(browser: Window, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<html lang="en"><title>a</title><main><h1>a</h1><img src="data:image/gif;base64,"></main></html>'
    )
    assert [each.split(":")[0] for each in violations(browser, page, "light")] == ["image-alt"]
