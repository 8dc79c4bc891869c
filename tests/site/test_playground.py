"""The playground in a browser: what a visitor moves, sees, shares and copies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.window import Window
from tests.site.test_site import resize, strangers
from tools.website import playground

pytestmark = [pytest.mark.needs_chromium, pytest.mark.slow]
STATE = "#layout=zigzag&mask=full&schedule=allgather&P=4&S=14&H=64&K=8&machine=a100&speed=-3"


@pytest.fixture
def page(site: Path, browser: Window) -> Iterator[Any]:
    """The playground as it opens."""
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
    assert "Ranks wait 47 %" in page.locator(".play-headline").inner_text()
    page.get_by_label("zig-zag").check()
    assert "All ranks compute all the time" in page.locator(".play-headline").inner_text()
    assert "layout=zigzag" in page.evaluate("location.hash")


def test_the_address_is_the_state(site: Path, browser: Window, page: Any) -> None:
    page.goto((site / "play.html").as_uri() + STATE)
    page.reload()
    assert page.get_by_label("all-gather").is_checked() and page.get_by_label("full").is_checked()
    assert page.locator("#play-machine").input_value() == "a100"
    assert page.locator("output[for=play-S]").inner_text() == "16Ki"
    assert page.evaluate("location.hash") == STATE


def test_a_change_is_compared_with_what_was_before(page: Any) -> None:
    page.get_by_label("zig-zag").check()
    assert "it was 50.9 ms (1.87 times as fast)" in page.locator(".play-headline").inner_text()
    page.locator("#play-S").focus()
    page.keyboard.press("ArrowRight")  # twice as much work: nothing to compare
    assert "it was" not in page.locator(".play-headline").inner_text()
    assert page.locator("button[aria-pressed=true]").count() == 0


def test_what_does_not_fit_is_in_the_headline(site: Path, page: Any) -> None:
    page.goto((site / "play.html").as_uri() + "#layout=zigzag&P=2&S=24&H=128&K=8&machine=h100")
    page.reload()
    words = page.locator(".play-headline").inner_text()
    assert re.search(r"It does not fit: a rank needs [\d.]+ [GT]B and has 85.5 GB\.", words)
    assert "does not fit" in said(page, "memory of a rank")


def test_a_story_goes_when_the_setting_has_left_it(page: Any) -> None:
    note = page.locator(".play-note")
    told = note.inner_text()
    page.get_by_label("zig-zag").check()  # the story asks for it
    assert told and note.inner_text() == told
    page.get_by_label("full").check()
    assert note.inner_text() == ""
    page.get_by_label("causal").check()
    assert note.inner_text() == told


def test_there_are_never_more_kv_heads_than_query_heads(page: Any) -> None:
    page.locator("#play-K").press("End")
    assert (
        page.locator("output[for=play-H]").inner_text()
        == page.locator("output[for=play-K]").inner_text()
        == "32"
    )


def test_a_turned_phone_keeps_the_comparison(page: Any, browser: Window) -> None:
    def width() -> int:
        return int(page.locator(".play-timeline svg").get_attribute("viewBox").split()[2])

    page.get_by_label("zig-zag").check()
    words = page.locator(".play-headline").inner_text()
    wide = width()
    resize(browser, 390)
    assert "it was" in words and page.locator(".play-headline").inner_text() == words
    assert width() < 400 < wide
    resize(browser, 1280)
    assert width() == wide


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_copy_of_a_block_waits_until_the_next_rank_takes_it(site: Path, page: Any, layout: str) -> None:
    """On two nodes: at all times, a copy is under way or waits from its hop's start until its receiver begins on it."""
    page.goto((site / "play.html").as_uri() + f"#layout={layout}&mask=causal&P=16&S=16&machine=h100")
    page.reload()
    wrong = page.evaluate("""() => {
      const machine = JSON.parse(document.getElementById("playground-choices").textContent).machines[0];
      const layout = new URLSearchParams(location.hash.slice(1)).get("layout");
      const s = { layout, causal: true, schedule: "ring", P: 16, S: 65536, H: 32, K: 8, D: 128, machine };
      const found = ringModel.simulate(s), [picture, follow] = playViews.ringView(s, found);
      const copies = [...picture.querySelectorAll(".play-moving")];
      let wrong = 0;
      for (let n = 0; n <= 400; n += 1) {
        const now = (n / 400) * found.makespan;
        follow(now);
        copies.forEach((copy, rank) => {
          const next = found.begins[(rank + 1) % 16];
          const due = found.hops[rank].filter(([start], step) => start <= now && now < next[step + 1]).length;
          if (due > 1 || (copy.getAttribute("visibility") === "visible") !== (due === 1)) wrong += 1;
        });
      }
      return wrong;
    }""")
    assert wrong == 0


def test_every_rank_stands_in_a_table_with_names(page: Any) -> None:
    page.get_by_text("Every rank in numbers").click()
    assert page.locator(".play-table thead").is_visible()
    assert page.locator(".play-table tbody tr").first.inner_text().split("\t")[:2] == ["0", "16,384"]


def test_a_click_into_the_timeline_moves_the_time(page: Any) -> None:
    box = page.locator(".play-timeline svg").bounding_box()
    page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 20)
    assert 400 < int(page.locator("#play-time").input_value()) < 700


def test_an_address_with_nonsense_opens_the_first_example(site: Path, page: Any) -> None:
    page.goto((site / "play.html").as_uri() + "#P=9&S=<img src=x onerror=alert(1)>&machine=none&layout=")
    page.reload()
    assert "128Ki tokens on 8" in page.locator(".play-headline").inner_text()
    assert page.locator("#playground img").count() == 0


def test_it_is_moved_by_keys(page: Any) -> None:
    page.locator("#play-P").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("output[for=play-P]").inner_text() == "12"
    assert page.locator(".play-timeline [data-rank]").count() == 12
    page.locator("#play-layout-contiguous").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#play-layout-striped").is_checked()


def test_no_more_key_value_heads_than_query_heads(page: Any) -> None:
    page.locator("#play-K").focus()
    page.keyboard.press("End")
    assert page.locator("output[for=play-H]").inner_text() == page.locator("output[for=play-K]").inner_text()


@pytest.mark.parametrize("name", ["Why zig-zag?", "When the link is too slow", "Two nodes", "All at once"])
def test_an_example_shows_what_it_says(page: Any, name: str) -> None:
    page.get_by_role("button", name=name).click()
    assert page.get_by_role("button", name=name).get_attribute("aria-pressed") == "true"
    assert len(page.locator(".play-note").inner_text()) > 100
    waits = "for ranks with more" if name == "Why zig-zag?" else "for messages"
    assert waits in page.locator(".play-headline").inner_text()


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


def test_who_wants_no_motion_goes_step_by_step(browser: Window, page: Any) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.get_by_role("button", name="Play", exact=True).click()
    assert page.locator("#play-time").input_value() == "50"
    page.wait_for_timeout(200)
    assert page.locator("#play-time").input_value() == "50"
    page.emulate_media(reduced_motion="no-preference")


@pytest.mark.parametrize("state", ["", STATE])
def test_its_commands_give_its_numbers(site: Path, page: Any, tmp_path: Path, state: str) -> None:
    page.goto((site / "play.html").as_uri() + state)
    page.reload()
    texts = page.locator(".play-commands pre").all_inner_texts()
    if state:
        (tmp_path / "mine.toml").write_text(texts[1])
    (command, plan) = (line.split() for line in texts[0].splitlines() if not line.startswith("#"))
    assert command[:2] == ["ringlab", "simulate"] and plan[:2] == ["ringlab", "plan"]
    planned = subprocess.run([sys.executable, "-m", *plan], cwd=tmp_path, capture_output=True, text=True)
    assert planned.returncode in (0, 1) and "needed:" not in planned.stderr, planned.stderr  # 1: does not fit
    run = [sys.executable, "-m", *command, "--json"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shown = page.evaluate("document.querySelector('.play-figures dd').textContent")
    number, unit = shown.split()
    seconds = float(number) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert seconds == pytest.approx(found["makespan_s"], rel=6e-3)  # three digits are shown
    share = float(re.match(r"[\d.]+", said(page, "ranks compute"))[0])  # type: ignore[index]
    assert share == pytest.approx(100 * found["busy_fraction"], abs=0.06)


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


def test_its_machines_are_those_of_the_tables() -> None:
    offered = playground.choices()
    assert {each["name"] for each in offered["machines"]} == set(playground.MACHINES)


def test_it_offers_the_layouts_and_schedules_that_are_compared_with_the_simulator(page: Any) -> None:
    for name, values in (("layout", playground.LAYOUTS), ("schedule", playground.SCHEDULES)):
        shown = page.locator(f"input[name=play-{name}]")
        assert shown.evaluate_all("all => all.map(each => each.value)") == list(values)


def test_its_machines_have_memory_and_its_models_heads_of_its_size() -> None:
    offered = playground.choices()
    assert all(each["memory"] > 0 and each["flops"] > 0 for each in offered["machines"])
    assert [each["name"] for each in offered["models"]] == list(playground.MODELS)
