"""The built pages are complete, linked and readable on a phone and in the dark, and request nothing elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest

import ringlab
from ringlab.viz.frontend import FRAMES
from ringlab_course.builder.sources import prepare, targets
from ringlab_course.catalogue import LESSONS
from ringlab_course.checking.contract import Stage
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.errata.collection import GROUPS
from ringlab_course.notebook.predictions import ROOM
from tools.browser import Window
from tools.website import links, misconceptions, source
from tools.website.docstrings import to_markdown
from tools.website.notebooks import NONE_MADE

pytestmark = [pytest.mark.thorough, pytest.mark.slow]
CHECKOUT = Path(__file__).resolve().parents[2]
EVERY = targets(CHECKOUT)
LESSON_PAGES = [target for target in EVERY if target.kind == "lesson"]
PLAYED = ("02", "05", "09")
"""Lessons with pictures that move on the page as in the notebook: a scan, a ring, couriers."""
EXERCISE_PAGES = [target for target in EVERY if target.kind == "exercise"]
LOOKED_AT = (
    "index.html",
    "notebooks/02_online_softmax.html",
    "notebooks/05_emulated_ring.html",
    "exercises/05_emulated_ring.html",
    "misconceptions/index.html",
    "misconceptions/05_emulated_ring.html",
    "api/ringlab.html",
    "docs/kill-matrix.html",
    "docs/guide/schedules.html",
)


def text_of(page: Path) -> str:
    """Return roughly the text that a reader sees: the page without its tags."""
    body = page.read_text(encoding="utf-8").split("<article", 1)[1]
    return html.unescape(re.sub(r"<[^>]+>", "", body))


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert links.problems(site) == []
    assert len([*site.rglob("*.html")]) > 2 * len(LESSON_PAGES)


def test_the_first_page_lists_every_lesson(site: Path) -> None:
    first = links.Page(site / "index.html")
    text = text_of(site / "index.html")
    for lesson in LESSONS:
        assert lesson.title in text
        assert f"notebooks/{lesson.slug}.html" in first.links
    rooms = {"exercises/index.html", "misconceptions/index.html", "api/index.html", "docs/instructors.html"}
    assert rooms <= set(first.links)
    assert "make lab" in text and "make test" in text


def solution_lines(source: str) -> set[str]:
    """Return the longer lines between the marks of a solution that occur nowhere else in the source."""
    inside = re.findall(r"# BEGIN SOLUTION.*?\n(.*?)# END SOLUTION", source, re.DOTALL)
    outside = re.sub(r"# BEGIN SOLUTION.*?# END SOLUTION", "", source, flags=re.DOTALL)
    lines = {line.strip() for part in inside for line in part.splitlines()}
    return {line for line in lines if len(line) > 30 and line not in outside}


def test_a_notebook_can_be_downloaded_as_it_is_in_a_checkout(site: Path) -> None:
    for target in [*LESSON_PAGES, *EXERCISE_PAGES]:
        page = site / target.path.parent.name / f"{target.slug}.html"
        (link,) = [each for each in links.Page(page).links if each.endswith(".ipynb")]
        found = page.parent / link
        assert found.name == target.path.name  # because the judge identifies the exercise by the file's name
        skeleton = (
            nbformat.writes(prepare(target, CHECKOUT)) + "\n"
        )  # the unchanged skeleton, since a learner may have edited the file
        assert found.read_text() == (skeleton if target in EXERCISE_PAGES else target.path.read_text())


def test_no_page_gives_a_solution_away(site: Path) -> None:
    found = 0
    for target in EXERCISE_PAGES:
        lines = solution_lines(target.source.read_text(encoding="utf-8"))
        text = text_of(site / f"exercises/{target.slug}.html")
        found += len(lines)
        assert [line for line in lines if line in text] == []
        assert "NotImplementedError" in text
    assert found > 100
    assert not (site / "solutions").exists()


def stages() -> Iterator[tuple[str, Stage]]:
    for exercise in map(load_exercise, exercise_ids()):
        yield from ((exercise.slug, stage) for stage in exercise.stages)


def missing_mistakes(site: Path) -> list[str]:
    """Return the mistakes that the index does not link to, or whose page does not explain them."""
    missing = []
    index = links.Page(site / "misconceptions/index.html")
    for slug, stage in stages():
        page = site / f"misconceptions/{slug}.html"
        if not stage.misconceptions:
            continue
        written = page.read_text(encoding="utf-8")
        seen = " ".join(text_of(page).split())
        if " ".join(stage.hints[0].replace("`", "").split()) not in seen:
            missing.append(f"{stage.id}: its question")
        for entry in misconceptions.entries(stage):
            if (
                f"{slug}.html#{entry.anchor(stage)}" not in index.links
                or f'id="{entry.anchor(stage)}"' not in written
            ):
                missing.append(f"{stage.id}: {entry.names[0]}")
            if " ".join(entry.message.replace("`", "").split()) not in seen:
                missing.append(f"{stage.id}: what {entry.names[0]} says")
        for misconception in stage.misconceptions:
            if f">{html.escape(misconception.name)}<" not in written:
                missing.append(f"{stage.id}: {misconception.name}")
    return missing


def test_the_index_leads_to_every_misconception_of_the_contracts(site: Path) -> None:
    assert missing_mistakes(site) == []


@pytest.mark.parametrize("slug", [target.slug for target in LESSON_PAGES])
def test_a_lesson_shows_what_it_drew_and_printed(site: Path, slug: str) -> None:
    notebook = nbformat.read(CHECKOUT / "notebooks" / f"{slug}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    players = [output.data[FRAMES]["pictures"] for output in outputs if FRAMES in output.get("data", {})]
    stills = [
        output for output in outputs if {*output.get("data", {})} & {"image/png", FRAMES} == {"image/png"}
    ]
    folded = re.findall("<img ", "".join(output.get("data", {}).get("text/html", "") for output in outputs))
    drawn = [*stills, *folded, *(picture for player in players for picture in player)]
    page = site / f"notebooks/{slug}.html"
    article = page.read_text(encoding="utf-8").split("<article", 1)[1]
    pictures = re.findall(r"<img [^>]*>", re.sub(r'<p class="opening">.*?</p>', "", article))
    text = text_of(page)
    assert len(pictures) == len(drawn) and all(re.search(r'alt="[^"]{20}', tag) for tag in pictures)
    printed = [output.text.replace(NONE_MADE, "") for output in outputs if output.output_type == "stream"]
    assert all(each.splitlines()[0] in text for each in printed) and NONE_MADE not in text
    asked = [str(output.data["text/plain"]) for output in outputs if "text/html" in output.get("data", {})]
    assert all(question.splitlines()[0] in text for question in asked if question.startswith("Predict:"))
    assert ROOM not in page.read_text(encoding="utf-8")  # a notebook's page cannot hide the answer by script
    for junk in ("could not be displayed", "vnd.jupyter", "<Figure", "VBox(", "interactive("):
        assert junk not in text


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = links.Page(site / "api/ringlab.html")
    index = text_of(site / "api/index.html")
    for name, home in ringlab._HOME.items():
        assert name in index
        room = home.rpartition(".")[0]
        assert f"{home}.{name}" in links.Page(site / f"api/{room}.html").anchors
    assert {"module-ringlab-oracle", "module-ringlab-errors"} <= page.anchors
    for package in ("ringlab.conformance", "ringlab_course", "ringlab.cost.planner", "ringlab_course.judge"):
        described = text_of(site / f"api/{package}.html")
        public = __import__(package, fromlist=["__all__"]).__all__
        assert [name for name in public if not re.search(rf"\b{name}\b", described)] == []


def test_an_entry_of_the_reference_leads_to_its_source(site: Path) -> None:
    entry = (site / "api/ringlab.html").read_text(encoding="utf-8").split('id="ringlab.layout.zigzag"')[1]
    line = entry.split('href="../source/ringlab.layout.html#', 1)[1].partition('"')[0]
    shown = (site / "source/ringlab.layout.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", shown.split(f'id="{line}"', 1)[1].partition(">")[2]))
    assert text.startswith("def zigzag(")
    there = source.link("ringlab.layout", 7, "ringlab/layout.py", "https://code.example/ringlab.git")
    assert there == "https://code.example/ringlab/blob/main/ringlab/layout.py#L7"


def test_arguments_that_follow_a_sentence_are_a_list() -> None:
    text = to_markdown(
        "Return rows.\nscale: D by default.\nsinks: logits. seed: a number.\n\nLayouts: who owns what."
    )
    rows = ["Return rows.", "", "- `scale`: D by default.", "- `sinks`: logits.", "- `seed`: a number."]
    assert text.splitlines() == [*rows, "", "Layouts: who owns what."]


@pytest.mark.needs_chromium
@pytest.mark.parametrize(
    ("name", "cards"),
    [("docs/errata.html", "h3"), ("misconceptions/05_emulated_ring.html", "dl[id^=mistake-]")],
)
def test_a_card_has_a_link_of_its_own(site: Path, browser: Window, name: str, cards: str) -> None:
    page = browser.page
    page.goto((site / name).as_uri())
    buttons = page.get_by_role("button", name="Copy link")
    assert buttons.count() == page.locator(cards).count() > 10
    buttons.nth(3).click()
    target = page.locator(":target")
    assert target.count() == 1 and target.locator(".copy-link").count() == 1


def test_a_wrong_claim_is_marked_and_no_heading_makes_it(site: Path) -> None:
    text = (site / "docs/errata.html").read_text(encoding="utf-8")
    claims = re.findall(r"Wrong claim\.</strong> <s>(.*?)</s></p>", text, re.DOTALL)
    assert len(claims) == sum(len(group.entries) for group in GROUPS)
    headings = re.findall(r"<h3>(.*?)<a class=\"headerlink\"", text)
    assert len(headings) == len(claims) and not {*claims} & {*headings}


def resize(window: Window, width: int, height: int = 900) -> None:
    """Set the size of the window, and wait until the page has this size."""
    window.page.set_viewport_size({"width": width, "height": height})
    window.page.wait_for_function(f"innerWidth === {width} && innerHeight === {height}")


def strangers(window: Window) -> list[str]:
    """Return the requested addresses that are neither files nor on this machine."""
    return [url for url in window.strangers() if urlsplit(url).scheme != "file"]


@pytest.mark.needs_chromium
@pytest.mark.parametrize("way", ["http", "file"])
def test_no_request_leaves_the_machine(site: Path, address: str, browser: Window, way: str) -> None:
    base = address if way == "http" else site.as_uri()
    browser.asked.clear()
    browser.complaints.clear()
    for name in LOOKED_AT:
        browser.page.goto(f"{base}/{name}")
        browser.page.wait_for_load_state("networkidle")
    assert len(browser.asked) > len(LOOKED_AT)
    assert strangers(browser) == [] and browser.complaints == []


@pytest.mark.needs_chromium
@pytest.mark.parametrize("slug", [target.slug for target in LESSON_PAGES[::4]])
def test_a_question_keeps_back_what_was_measured_until_it_is_answered(
    site: Path, browser: Window, slug: str
) -> None:
    notebook = nbformat.read(CHECKOUT / "notebooks" / f"{slug}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    asked = sum(
        str(output.get("data", {}).get("text/plain", "")).startswith("Predict:") for output in outputs
    )
    page = browser.page
    page.goto((site / f"notebooks/{slug}.html").as_uri())
    page.evaluate("localStorage.clear()")
    page.reload()
    forms = page.locator("form.question")
    assert forms.count() == asked
    measured = "[...document.querySelectorAll('.tag_measured')].filter(e => e.checkVisibility()).length"
    assert page.evaluate(measured) == 0
    for number in range(asked):
        form = forms.nth(number)
        if form.locator("input[type=number]").count():
            form.locator("input").fill("7")
        else:
            form.locator("input").first.check()
        form.get_by_role("button", name="Compare").press("Enter")
        assert "You predicted" in form.locator(":focus").inner_text()
        assert page.evaluate(measured) <= number + 1  # one button may answer several questions of a cell
    assert page.evaluate(measured) == page.locator(".tag_measured").count() > 0
    page.reload()
    assert page.locator(".kept-back").count() == 0
    page.evaluate("localStorage.clear()")
    page.reload()
    page.get_by_role("button", name="Show all answers").press("Enter")
    assert forms.first.locator(":focus").inner_text() == "Not answered."
    page.evaluate("localStorage.clear()")


@pytest.mark.needs_chromium
def test_a_lesson_begins_with_a_picture(site: Path, browser: Window) -> None:
    """No picture counts that waits for an answer or begins below the first screen."""
    seen = """[...document.querySelectorAll("article :is(img, svg)")].filter(picture => picture.checkVisibility())
        .map(picture => picture.getBoundingClientRect()).filter(box => box.top < 900 && box.width > 200).length"""
    tall = "[...document.querySelectorAll('.opening img')].filter(picture => picture.height > 300).length"
    resize(browser, 1400)
    for target in LESSON_PAGES:
        browser.page.goto((site / f"notebooks/{target.slug}.html").as_uri())
        assert browser.page.evaluate(seen), target.slug
        assert not browser.page.evaluate(tall), target.slug
    resize(browser, 1280)


@pytest.mark.needs_chromium
def test_a_section_that_a_question_hides_says_so(site: Path, browser: Window) -> None:
    hidden = """[...document.querySelectorAll("article section:has(> :is(h2, h3) + *)")].filter(section =>
        [...section.children].filter(part => part.checkVisibility()).length < 2
    ).map(section => section.id)"""
    page = browser.page
    waiting = page.locator(".waiting:visible")
    found = 0
    for target in LESSON_PAGES:
        page.goto((site / f"notebooks/{target.slug}.html").as_uri())
        assert page.evaluate(hidden) == []
        if waiting.count():
            found += 1
            page.emulate_media(media="print")
            assert waiting.count() == 0
            page.emulate_media(media="screen")
            page.get_by_role("button", name="Show all answers").click()
            assert waiting.count() == 0
            page.evaluate("localStorage.clear()")
    assert found


@pytest.mark.needs_chromium
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_phone_need_not_scroll_sideways(site: Path, browser: Window, name: str) -> None:
    resize(browser, 390, 844)
    browser.page.goto((site / name).as_uri())
    assert browser.page.evaluate("document.documentElement.scrollWidth") <= 390
    # An element that would be wider than the page has its own scroll bar, so that the page itself does not
    # scroll.
    if name == "docs/kill-matrix.html":
        wide = "[...document.querySelectorAll('.table-wrapper')].filter(t => t.scrollWidth > t.clientWidth)"
        assert browser.page.evaluate(f"{wide}.every(t => getComputedStyle(t).overflowX === 'auto')")
        assert browser.page.evaluate(f"{wide}.length") > 10
    resize(browser, 1280)


@pytest.mark.parametrize("name", ["layouts", "masks"])
def test_the_text_of_a_drawing_can_be_read_on_a_phone(name: str) -> None:
    drawing = (CHECKOUT / f"docs/guide/{name}.svg").read_text(encoding="utf-8")
    width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', drawing)[0])
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', drawing)]
    assert (
        len(sizes) >= 8 and min(sizes) * min(1, 358 / width) > 11
    )  # pixels; 358 is the width of a phone's text


@pytest.mark.needs_chromium
@pytest.mark.parametrize("name", ["docs/guide/memory.html", "docs/benchmarks.html"])
def test_the_list_of_pages_shows_the_current_one(site: Path, browser: Window, name: str) -> None:
    resize(browser, 1280)
    browser.page.goto((site / name).as_uri())
    inside = """() => {
        const list = document.querySelector(".sidebar-scroll").getBoundingClientRect();
        const current = document.querySelector(".sidebar-tree .current-page > a").getBoundingClientRect();
        return list.top <= current.top && current.bottom <= Math.min(list.bottom, innerHeight) && scrollY === 0;
    }"""
    assert browser.page.evaluate(inside)


@pytest.mark.needs_chromium
def test_a_chosen_theme_holds_for_drawings(site: Path, browser: Window) -> None:
    browser.page.goto((site / "docs/guide/layouts.html").as_uri())
    for theme in ("dark", "light"):
        browser.page.evaluate("theme => { document.body.dataset.theme = theme; }", theme)
        picture = browser.page.locator('article img[src$="layouts.svg"]')
        assert picture.evaluate("picture => getComputedStyle(picture).colorScheme") == theme


@pytest.mark.needs_chromium
@pytest.mark.parametrize("slug", [target.slug for target in LESSON_PAGES if target.slug[:2] in PLAYED])
def test_recorded_pictures_play(site: Path, browser: Window, slug: str) -> None:
    """Keys move the slider and Play runs the pictures; one picture is shown at a time, with its text."""
    page = browser.page
    page.goto((site / f"notebooks/{slug}.html").as_uri())
    if (every := page.get_by_role("button", name="Show all answers")).count():
        every.click()
    player = page.locator("[data-frames]")
    frames = player.locator("[data-name]")
    last = frames.count() - 1
    assert last >= 2

    def seen() -> list[int]:
        return [number for number in range(last + 1) if frames.nth(number).is_visible()]

    words = player.locator("> p")
    assert seen() == [0] and (before := words.inner_text())
    slider = player.get_by_role("slider")
    slider.press("ArrowRight")
    assert seen() == [1] and words.inner_text() != before
    name = frames.nth(1).get_attribute("data-name")
    assert player.locator("output").inner_text() == f"{player.get_attribute('data-frames')} {name}"
    player.get_by_role("button", name="Play").click()
    assert seen() == [2]
    player.get_by_role("button", name="Pause" if last > 2 else "Play").click()
    slider.press("End")
    player.get_by_role("button", name="Play").click()
    assert seen() == [0]
    player.get_by_role("button", name="Pause").click()
    page.evaluate("localStorage.clear()")
