"""Formulas are drawn by a copy of KaTeX that is stored with the pages, and no page is heavy."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tools.browser import Window
from tools.website import links

pytestmark = [pytest.mark.thorough, pytest.mark.slow]


@pytest.mark.needs_chromium
@pytest.mark.slow
def test_every_formula_of_the_course_can_be_drawn(site: Path, browser: Window) -> None:
    pages = [
        page for page in sorted(site.rglob("*.html")) if "formulas.js" in page.read_text(encoding="utf-8")
    ]
    assert len(pages) >= 10
    for page in pages:
        browser.page.goto(page.as_uri())
        browser.page.wait_for_selector("html[data-formulas=drawn]")
        assert browser.page.locator(".katex").count() > 0
        wrong = browser.page.locator(".katex-error").evaluate_all("all => all.map(each => each.title)")
        assert wrong == [], page.name


def test_no_page_loads_much_at_first(site: Path) -> None:
    """No page loads 1.5 MB at first, even counting late pictures and all fonts."""
    formulas = sum(file.stat().st_size for file in (site / "_static/katex").rglob("*") if file.is_file())
    for path in site.rglob("*.html"):
        page = links.Page(path)
        loads = [urlsplit(link).path for link in page.loads if not urlsplit(link).scheme]
        files = {(path.parent / load).resolve() for load in loads if load}
        drawn = formulas if any("formulas.js" in load for load in loads) else 0
        assert path.stat().st_size + sum(file.stat().st_size for file in files) + drawn < 1.5e6, path.name
