"""In a browser, the playground's controls, pictures, links and commands agree with each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.site.test_site import resize, strangers
from tools.browser import Window

pytestmark = [pytest.mark.thorough, pytest.mark.needs_chromium, pytest.mark.slow]
STATE = "#layout=zigzag&mask=full&schedule=allgather&P=4&S=14&H=64&K=8&machine=a100&speed=-3"


@pytest.fixture
def page(site: Path, browser: Window) -> Iterator[Any]:
    """Open the playground with its initial setting; after the test, check that the page had no errors."""
    browser.asked.clear()
    browser.complaints.clear()
    browser.page.goto((site / "play.html").as_uri())
    yield browser.page
    assert browser.complaints == [] and strangers(browser) == []


def said(page: Any, name: str) -> str:
    """Return a number of the playground by its name."""
    found = page.locator(".play-figures div", has=page.get_by_text(name, exact=True)).locator("dd")
    return str(found.inner_text())


def test_it_opens_on_an_imbalance_and_zig_zag_removes_it(page: Any) -> None:
    assert "a rank computes 53 % of the time and is idle 47 %" in headline(page)
    page.get_by_label("zig-zag").check()
    assert "All ranks compute all the time" in headline(page)
    assert "layout=zigzag" in page.evaluate("location.hash")


def test_the_address_is_the_state(site: Path, browser: Window, page: Any) -> None:
    page.goto((site / "play.html").as_uri() + STATE)
    page.reload()
    assert page.get_by_label("all-gather").is_checked() and page.get_by_label("full").is_checked()
    assert page.locator("#play-machine").input_value() == "a100"
    assert page.locator("output[for=play-S]").inner_text() == "16Ki"
    assert page.evaluate("location.hash") == STATE


def headline(page: Any) -> str:
    """Return the sentence above the pictures, with plain spaces."""
    return str(page.locator(".play-headline").inner_text()).replace("\N{NO-BREAK SPACE}", " ")


def opened(site: Path, page: Any, state: str) -> None:
    """Open the playground in a state given by a link."""
    page.goto((site / "play.html").as_uri() + state)
    page.reload()


def test_a_change_is_compared_with_the_value_before_the_first_step(page: Any) -> None:
    """All values that the arrow keys pass are compared with the first value, not with the previous one."""
    page.locator("#play-layout-contiguous").focus()
    for _ in ("striped", "zigzag"):
        page.keyboard.press("ArrowRight")
    assert "27.2 ms, 47 % less than with contiguous (50.9 ms): 1.87 times as fast." in headline(page)
    page.reload()
    assert "less than with contiguous (50.9 ms): 1.87 times as fast." in headline(page)
    page.locator("#play-S").focus()
    page.keyboard.press("ArrowRight")  # twice as many tokens are more work for both layouts
    assert "than with contiguous (204 ms): 1.87 times as fast." in headline(page)
    assert page.locator("button[aria-pressed=true]").count() == 0
    page.locator("#play-P").focus()
    for _ in (12, 16, 24):
        page.keyboard.press("ArrowRight")
    assert re.search(r"less than with 8 ranks \(109 ms\): .* times as fast\.", headline(page))
    page.get_by_role("button", name="All at once").click()
    assert "times as" not in headline(page)
    page.get_by_label("ring", exact=True).check()
    assert re.search(r"less than with all-gather \(", headline(page))


def test_the_run_before_stays_as_an_outline_on_the_same_axis(page: Any) -> None:
    def end_of(picture: str) -> float:
        return float(page.locator(f".play-timeline {picture}").last.get_attribute("x"))

    whole = end_of(".play-axis")
    page.get_by_label("zig-zag").check()
    assert page.locator(".play-saved").text_content() == "\N{MINUS SIGN}47 %"
    assert float(page.locator(".play-before-end").get_attribute("x1")) == pytest.approx(whole)
    assert end_of(".play-axis") - 52 == pytest.approx((whole - 52) * 27.2 / 50.9, rel=0.01)
    page.go_back()
    page.wait_for_function("location.hash.includes('contiguous')")
    assert page.locator(".play-saved").count() == 0 and "50.9 ms" in headline(page)


def test_messages_are_red_while_their_rank_waits(site: Path, page: Any) -> None:
    """In a slow ring, a rank waits while it computes nothing and a message to it is on its way.

    A rank that has computed its last block does not wait for the blocks that still pass through it.
    """
    assert said(page, "exposed communication") == "0 s" and page.locator("rect.play-exposed").count() == 0
    page.get_by_role("button", name="A slow link").click()
    assert "over links of 1/16 of the machine's speed" in headline(page)
    widths = "all => all.map(each => Number(each.getAttribute('width'))).reduce((a, b) => a + b, 0)"
    exposed = page.locator("rect.play-exposed").evaluate_all(widths)
    rows = page.locator(".play-row").evaluate_all(widths)
    assert exposed / rows == pytest.approx(0.80, abs=0.02)  # as the headline says
    page.get_by_role("button", name="Why zig-zag?").click()
    page.get_by_label("zig-zag").check()
    assert page.locator("rect.play-exposed").count() == 0
    assert page.locator("rect.play-hidden").count() > 0


def test_the_triangle_has_as_many_rows_of_each_rank_and_the_sums_are_the_work(page: Any) -> None:
    rows = "all => all.map(each => [Number(each.dataset.rank), Number(each.getAttribute('width'))])"
    for label, equal in (("contiguous", False), ("zig-zag", True)):
        page.get_by_role("radio", name=label).check()
        sums = [0.0] * 8
        for rank, width in page.locator("rect.play-pairs").evaluate_all(rows):
            sums[rank] += width
        bars = page.locator(".play-sum").evaluate_all("all => all.map(each => parseFloat(each.style.width))")
        page.wait_for_timeout(50)
        assert (max(sums) - min(sums) < 1e-6) == equal
        assert [each / max(bars) for each in bars] == pytest.approx(
            [each / max(sums) for each in sums], abs=0.04
        )


def test_a_guess_is_kept_until_the_answer_is_seen(page: Any) -> None:
    question = page.locator(".play-question")
    question.get_by_role("button", name="1.9", exact=True).click()
    assert question.inner_text() == "You guessed 1.9. Now choose zig-zag."
    page.get_by_label("zig-zag").check()
    assert "1.00 times, in this model. You guessed 1.9." in question.inner_text()
    page.get_by_role("button", name="A slow link").click()
    assert question.get_by_role("button").all_inner_texts() == ["32Ki", "128Ki", "512Ki", "2Mi"]


def test_the_first_page_moves_once_and_ends_on_the_ratio(site: Path, browser: Window) -> None:
    shown = browser.page
    shown.goto((site / "index.html").as_uri())
    legend = shown.locator(".play-when").inner_text()
    assert "row is a GPU" in legend and "whose keys" in legend and "hatched" in legend
    assert "50.9 ms (simulated): the GPUs compute 53 % of this time and wait 47 %" in headline(shown)
    shown.wait_for_function("document.querySelector('.play-headline').textContent.endsWith('same bytes.')")
    assert (
        "27.2 ms instead of 50.9 ms (simulated): 47 % less, or 1.87 times as fast. Same GPUs, same bytes."
        in headline(shown)
    )
    assert "layout=zigzag" in shown.locator('.door[href^="play.html"]').get_attribute("href")


def test_the_five_minutes_can_be_touched(site: Path, browser: Window) -> None:
    browser.complaints.clear()
    shown = browser.page
    shown.goto((site / "five-minutes.html").as_uri())
    who, ring, merge, hop, zigzag = (
        shown.locator(f"[data-five={name}]") for name in ("who", "ring", "merge", "hop", "zigzag")
    )
    who.get_by_role("slider").press("Home")
    assert "needs 1 key, its own included: 1 of its own GPU alone" in who.inner_text()
    who.get_by_role("slider").press("End")
    assert "12 keys, its own included: 3 of its own GPU, and 9 of GPUs 0, 1 and 2" in who.inner_text()
    assert who.locator(".five-far").count() == 9
    ring.get_by_role("button", name="Play").click()
    shown.wait_for_function("document.querySelector('[data-five=ring] input').value === '1'")
    assert "After 1 hop, each GPU" in ring.inner_text()
    ring.get_by_role("button", name="Pause").click()
    ring.get_by_role("slider").press("End")
    assert "every query has met every key" in ring.inner_text()
    for blocks in range(2, 5):  # merging block by block gives the softmax over all words of these blocks
        merge.get_by_role("slider").fill(str(blocks))
        merged, whole = re.findall(r"(?:= |at once: )(\d\.\d\d)", merge.inner_text())
        assert merged == whole
    words, link = hop.get_by_role("slider").all()
    assert "The hop hides" in hop.inner_text()
    link.press("Home")
    assert "The hop is too long" in hop.inner_text()
    words.press("End")
    assert "The hop hides" in hop.inner_text()
    hard = "\N{NO-BREAK SPACE}"
    assert "compute 53 % of this time and wait 47 %" in zigzag.inner_text().replace(hard, " ")
    zigzag.get_by_role("button", name="more").click()
    sent, before = re.findall(r"([\d.]+.GB) in", zigzag.inner_text())
    assert sent == before and "You guessed: more." in zigzag.inner_text()
    assert "47 % less time and is 1.87 times as fast" in zigzag.inner_text().replace(hard, " ")
    assert browser.complaints == [] and strangers(browser) == []


@pytest.mark.parametrize(("H", "K"), [(8, 128)])
def test_an_address_says_no_more_than_controls_can(site: Path, page: Any, H: int, K: int) -> None:
    opened(site, page, f"#H={H}&K={K}")
    most = min(H, K)
    assert page.locator("output[for=play-K]").inner_text() == str(most)
    assert f"&H={H}&K={most}&" in page.evaluate("location.hash")
    assert f"--heads {H} --kv-heads {most} " in page.locator(".play-commands").inner_text()


def test_an_address_with_nonsense_opens_the_first_example(site: Path, page: Any) -> None:
    page.goto((site / "play.html").as_uri() + "#P=9&S=<img src=x onerror=alert(1)>&machine=none&layout=")
    page.reload()
    assert "128Ki tokens on 8" in headline(page)
    assert page.locator("#playground img").count() == 0


def test_it_is_moved_by_keys(page: Any) -> None:
    page.locator("#play-P").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("output[for=play-P]").inner_text() == "12"
    assert page.locator(".play-timeline [data-rank]").count() == 12
    page.locator("#play-layout-contiguous").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#play-layout-striped").is_checked()


@pytest.mark.parametrize("P", [8, 12, 16, 24, 64])
def test_marks_stay_readable_with_many_ranks(site: Path, page: Any, P: int) -> None:
    opened(site, page, f"#P={P}")
    fills = page.locator(".play-row").evaluate_all("all => all.map(each => getComputedStyle(each).fill)")
    assert len(fills) == P and {"url" in fill for fill in fills} == {P <= 16}
    rows = "all => all.map(each => each.getBoundingClientRect()).map(box => [box.top, box.bottom])"
    # a box of text is a little higher than its digits
    for picture in (".play-pairs", ".play-timeline"):
        boxes = page.locator(f"{picture} .play-row-name").evaluate_all(rows)
        assert all(below[0] > above[1] - 2 for above, below in pairwise(boxes)), picture


@pytest.mark.parametrize("name", ["Why zig-zag?", "Two nodes"])
def test_an_example_shows_what_it_says(page: Any, name: str) -> None:
    page.get_by_role("button", name=name).click()
    assert page.get_by_role("button", name=name).get_attribute("aria-pressed") == "true"
    assert len(page.locator(".play-note").inner_text()) > 100
    waits = "for ranks with more" if name == "Why zig-zag?" else "for messages"
    assert waits in headline(page)


def test_time_can_be_played_paused_and_moved(page: Any) -> None:
    page.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_function("document.getElementById('play-time').value > 5")
    page.get_by_role("button", name="Pause").click()
    stopped = page.locator("#play-time").input_value()
    page.wait_for_timeout(200)
    assert page.locator("#play-time").input_value() == stopped
    page.locator("#play-time").focus()
    page.keyboard.press("End")
    assert page.locator(".play-centre").text_content() == "0 of 8 compute"


KEEP = """() => {
const write = XMLSerializer.prototype.serializeToString;
XMLSerializer.prototype.serializeToString = function (picture) { window.kept = picture; return write.call(this, picture); };
}"""
OUTSIDE = """() => {
  kept.style.position = "fixed";
  document.body.append(kept);
  const { x, y, width, height } = kept.viewBox.baseVal;
  const outside = [...kept.querySelectorAll("text")].filter((text) => {
    const box = text.getBBox();
    return box.x < x || box.y < y || box.x + box.width > x + width || box.y + box.height > y + height;
  });
  return outside.map((text) => text.textContent);
}"""


@pytest.mark.parametrize("width", [390, 1400])
def test_a_saved_picture_has_its_whole_title_and_says_how_to_read_it(
    browser: Window, page: Any, width: int
) -> None:
    resize(browser, width)
    page.reload()
    page.get_by_role("button", name="A slow link").click()
    page.evaluate(KEEP)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save picture").click()
    written = " ".join(page.evaluate("[...kept.querySelectorAll('text')].map(text => text.textContent)"))
    title = page.locator(".play-headline").text_content()
    assert f"{title} (simulated)" in written
    assert "whose keys and values it works on" in written and "hatched" in written and "red" in written
    assert page.evaluate(OUTSIDE) == []
    drawn = Image.open(download.value.path())
    assert list(drawn.size) == page.evaluate(
        "[kept.viewBox.baseVal.width, kept.viewBox.baseVal.height].map(n => Math.floor(2 * n))"
    )
    resize(browser, 1280)


SAME_NAMES = {
    "makespan",
    "exposed communication",
    "ranks compute",
    "longest waiting rank",
    "peak memory of a rank",
    "bytes sent, all ranks",
}
"""Quantities that have the same name on the page and in the command."""


def words(shown: str) -> list[str | float]:
    """Return the words and numbers of a figure, which the command and the page print in different styles."""
    parts = shown.replace("%", " %").replace(" us", " µs").split()
    return [float(part) if part[0].isdigit() else part for part in parts]


def quantity(shown: str) -> float:
    """Return a displayed time in seconds, or a displayed size in bytes."""
    number, unit = shown.split()
    sizes = {
        "ns": 1e-9,
        "µs": 1e-6,
        "ms": 1e-3,
        "s": 1.0,
        "B": 1.0,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
    }
    return float(number) * sizes[unit]


@pytest.mark.parametrize(
    "state",
    [
        "",
        STATE,
        "#layout=striped&mask=causal&schedule=ring&P=2&S=12&H=8&K=1&machine=laptops&speed=-6",
    ],
)
def test_its_commands_give_its_numbers(site: Path, page: Any, tmp_path: Path, state: str) -> None:
    """A quantity of the same name has the same value on the page and in the command, in total and per rank."""
    opened(site, page, state)
    texts = page.locator(".play-commands pre").all_inner_texts()
    if len(texts) > 1:
        (tmp_path / "mine.toml").write_text(texts[1])
    command, *plans = (line.split() for line in texts[0].splitlines() if not line.startswith("#"))
    assert command[:2] == ["ringlab", "simulate"] and all(plan[:2] == ["ringlab", "plan"] for plan in plans)
    for plan in plans:
        planned = subprocess.run([sys.executable, "-m", *plan], cwd=tmp_path, capture_output=True, text=True)
        assert planned.returncode in (0, 1) and "needed:" not in planned.stderr, (
            planned.stderr
        )  # 1 means that the plan does not fit

    def ran(*more: str) -> str:
        run = [sys.executable, "-m", *command, *more]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = dict(re.findall(r"^ +([a-z][\w, ]+?)  +(.+)$", ran(), re.MULTILINE))
    names = page.locator(".play-figures dt").all_inner_texts()
    assert {name for name in names if name in printed} == SAME_NAMES
    for name in SAME_NAMES:
        assert words(said(page, name)) == words(printed[name]), name

    ranks = json.loads(ran("--json"))["per_rank"]
    page.get_by_text("Every rank in numbers").click()
    head = page.locator(".play-table thead th").all_inner_texts()
    rows = [row.split("\t") for row in page.locator(".play-table tbody tr").all_inner_texts()]
    columns = dict(zip(head, zip(*rows, strict=True), strict=True))
    for name, key in (("Computes", "busy_s"), ("Waits", "waited_s"), ("Peak memory", "peak_bytes")):
        shown = [quantity(each) for each in columns[name]]
        assert shown == pytest.approx(ranks[key], rel=6e-3, abs=1e-12), name  # three digits are shown
    whole = [
        sum(map(quantity, each))
        for each in zip(columns["Computes"], columns["Waits"], columns["Idle after its end"], strict=True)
    ]
    assert whole == pytest.approx([quantity(said(page, "makespan"))] * len(rows), rel=2e-2)


@pytest.mark.parametrize("name", ["index.html", "play.html"])
def test_a_phone_shows_the_switch_then_the_timeline_then_the_ring(
    site: Path, browser: Window, name: str
) -> None:
    resize(browser, 390, 844)
    browser.page.goto((site / name).as_uri())
    parts = (".play-now-set", ".play-headline", ".play-when", ".play-where")
    tops = [browser.page.locator(part).bounding_box()["y"] for part in parts]  # type: ignore[index]
    assert tops == sorted(tops)
    if name == "index.html":
        assert browser.page.locator(".door.first").bounding_box()["y"] < tops[0]  # type: ignore[index]
    if name == "play.html":  # an example brings its text, its control and the timeline into view
        browser.page.get_by_role("button", name="A slow link").click()
        browser.page.wait_for_function("scrollY > 100")
        browser.page.wait_for_timeout(800)
        tops = [browser.page.locator(part).bounding_box()["y"] for part in parts]  # type: ignore[index]
        browser.page.mouse.wheel(0, 600)
        browser.page.wait_for_timeout(300)
        assert 40 < browser.page.locator(".play-now-set").bounding_box()["y"] < 60  # type: ignore[index]
    assert tops[0] < 400 and tops[2] < 844 - 150
    assert browser.page.locator("#playground details[open]").count() == 0
    resize(browser, 1280)


@pytest.mark.parametrize("width", [390, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_at_any_width(browser: Window, page: Any, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    resize(browser, width)
    page.get_by_role("button", name="Two nodes").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = "[...document.querySelectorAll('#playground *:not(.play-table *)')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    assert page.evaluate(outside) == 0
    page.emulate_media(color_scheme="light")
    resize(browser, 1280)
