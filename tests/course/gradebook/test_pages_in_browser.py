"""In a real browser, pages of grades fit a phone, obey their security policy, load nothing, need no mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringlab_course.gradebook.pages import page_name, write_pages
from tests.course.gradebook.sample_class import WRONG, a_class, entry, saying

pytestmark = [pytest.mark.thorough, pytest.mark.needs_chromium]

EVIL = "<img src=x onerror='document.title=`owned`'><script>document.title='owned'</script><style>*{display:none}</style>"
NOT_SEEN = """() => [...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.right > innerWidth + 1 && !e.closest('.scroll, pre, .skip, .unseen') && box.width; }).map(e => e.tagName)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    hostile = entry(EVIL, report=saying(EVIL, EVIL, notes=[EVIL]))
    long = entry("W" * 79, report=saying("M" * 3000, "C" * 3000))
    write_pages([*a_class(), hostile, long], made, "A class")
    return made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    from tests.browser.window import PATIENCE, QUIET
    from tests.needs import chromium_path

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), headless=True, args=list(QUIET), timeout=PATIENCE
        )
        yield browser
        browser.close()


def new_page(browser: Any, **options: Any) -> Any:
    """Return a page in a new context, with timeouts long enough for a busy machine."""
    from tests.browser.window import PATIENCE

    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE)
    return context.new_page()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_pages_fit_and_ask_nobody(chromium: Any, folder: Path, width: int, scheme: str) -> None:
    page = new_page(chromium, viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    for path in sorted(folder.rglob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path.name
        assert page.evaluate(NOT_SEEN) == [], path.name
        assert page.evaluate("getComputedStyle(document.body).maxWidth") == "992px", "the style was refused"
        assert page.title() != "owned" and page.locator("h1").is_visible()
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 25, 31)")
    assert said == [] and {url.partition(":")[0] for url in asked} == {"file"}
    assert len(asked) == len(list(folder.rglob("*.html")))
    page.context.close()


def test_hints_open_by_keyboard_one_by_one(chromium: Any, folder: Path) -> None:
    page = new_page(chromium)
    page.goto((folder / "learners" / page_name("Late")).as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    first = page.locator("details").first
    first.locator("summary").first.focus()
    assert not first.locator("p").first.is_visible()
    page.keyboard.press("Enter")
    assert first.locator("p").first.is_visible() and not first.locator("p").nth(1).is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert first.locator("p").nth(1).is_visible() and not first.locator("p").nth(2).is_visible()
    page.context.close()


def test_what_is_printed_holds_every_check_and_no_hint(chromium: Any, folder: Path) -> None:
    page = new_page(chromium)
    page.goto((folder / "learners" / page_name("Late")).as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("tr.fails").first.is_visible() and page.locator("tr.holds").first.is_visible()
    assert not page.locator("details").first.is_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert WRONG and page.pdf()[:4] == b"%PDF"
    page.context.close()
