"""The playground in a browser: its controls, its pictures, its links and its commands."""

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
    assert "a rank is idle 47 % of the time" in page.locator(".play-headline").inner_text()
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


def headline(page: Any) -> str:
    """Return the sentence above the pictures."""
    return str(page.locator(".play-headline").inner_text())


def opened(site: Path, page: Any, state: str) -> None:
    """Open the playground in a state given by a link."""
    page.goto((site / "play.html").as_uri() + state)
    page.reload()


@pytest.mark.parametrize("hash", ["#what-you-see", "#playground", "#", "#what=it&is=not"])
def test_the_hash_of_a_heading_keeps_the_state(site: Path, page: Any, hash: str) -> None:
    opened(site, page, STATE)
    told, commands = headline(page), page.locator(".play-commands").inner_text()
    page.evaluate("hash => { location.hash = hash; }", hash)
    page.wait_for_timeout(100)
    assert headline(page) == told and page.locator(".play-commands").inner_text() == commands
    assert page.evaluate("location.hash") in (hash, hash.rstrip("#"))
    page.reload()
    assert headline(page) == told and page.evaluate("location.hash") == (STATE if hash == "#" else hash)
    page.go_back()
    page.wait_for_function("hash => location.hash === hash", arg=STATE)
    assert headline(page) == told
    page.get_by_label("striped").check()
    assert page.evaluate("location.hash") == STATE.replace("zigzag", "striped")


def test_links_within_the_page_keep_the_state(site: Path, page: Any) -> None:
    opened(site, page, STATE)
    told = headline(page)
    page.locator(".toc-tree a", has_text="What you see").dispatch_event("click")
    page.wait_for_function("location.hash === '#what-you-see'")
    assert headline(page) == told
    page.locator("a.skip-to-content").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("location.hash !== '#what-you-see'")
    assert headline(page) == told


def test_an_address_that_names_some_settings_keeps_the_others(site: Path, page: Any) -> None:
    opened(site, page, STATE)
    page.evaluate("location.hash = 'P=8'")
    page.wait_for_function("hash => location.hash === hash", arg=STATE.replace("P=4", "P=8"))


def test_a_change_is_compared_with_the_value_before_the_first_step(page: Any) -> None:
    """All values that the arrow keys pass are compared with the first value, not with the previous one."""
    page.locator("#play-layout-contiguous").focus()
    for _ in ("striped", "zigzag"):
        page.keyboard.press("ArrowRight")
    assert "27.2 ms, 1.87 times as fast as with contiguous (50.9 ms)." in headline(page)
    page.reload()
    assert "1.87 times as fast as with contiguous (50.9 ms)." in headline(page)
    page.locator("#play-S").focus()
    page.keyboard.press("ArrowRight")  # twice as many tokens are more work for both layouts
    assert "1.87 times as fast as with contiguous (204 ms)." in headline(page)
    assert page.locator("button[aria-pressed=true]").count() == 0
    page.locator("#play-P").focus()
    for _ in (12, 16, 24):
        page.keyboard.press("ArrowRight")
    assert re.search(r"times as fast as with 8 ranks \(109 ms\)\.", headline(page))
    page.get_by_role("button", name="All at once").click()
    assert "times as" not in headline(page)
    page.get_by_label("ring", exact=True).check()
    assert re.search(r"times as fast as with all-gather \(", headline(page))


def test_what_ranks_wait_for_is_always_said(site: Path, page: Any) -> None:
    """In each of many settings, the headline names a cause if it reports that ranks are idle."""
    opened(site, page, "#layout=striped&mask=causal&schedule=ring&P=32&S=12&H=32&K=1&machine=laptops&speed=0")
    assert re.search(r"idle 1 % of the time, waiting for (ranks|messages)", headline(page))
    found = page.evaluate("""() => {
      const { machines, tokens: [least, most], speeds: [slowest, fastest] } = JSON.parse(document.getElementById("playground-choices").textContent);
      const sentences = new Set();
      for (const layout of ["contiguous", "striped", "zigzag"]) for (const causal of [true, false])
      for (const schedule of ["ring", "allgather"]) for (const P of [2, 6, 32]) for (let n = least; n <= most; n += 1)
      for (const [H, K] of [[8, 8], [32, 1], [32, 8], [128, 1]]) for (const machine of machines)
      for (let speed = slowest; speed <= fastest; speed += 2) {
        const faster = (link) => ({ ...link, bandwidth: link.bandwidth * 2 ** speed });
        const s = { layout, causal, schedule, P, S: 2 ** n, H, K, D: 128, machine: { ...machine, inside: faster(machine.inside), between: faster(machine.between) } };
        sentences.add(playViews.idle(ringModel.simulate(s)).replace(/[\\d.]+ %/, "N %"));
      }
      return [...sentences].sort();
    }""")
    waiting = "On average a rank is idle N % of the time, waiting "
    causes = (
        "for messages",
        "for ranks with more to compute",
        "for ranks with more to compute and for messages",
    )
    others = ["All ranks compute all the time.", "Ranks compute over N % of the time."]
    assert found == sorted([*others, *(f"{waiting}{cause}." for cause in causes)])


def test_what_does_not_fit_is_in_the_headline(site: Path, page: Any) -> None:
    page.goto((site / "play.html").as_uri() + "#layout=zigzag&P=2&S=24&H=128&K=8&machine=h100")
    page.reload()
    words = page.locator(".play-headline").inner_text()
    assert re.search(r"It does not fit: a rank needs [\d.]+ [GT]B and has 85\.5 GB \(79\.6 GiB\)\.", words)
    assert "does not fit" in said(page, "with its own q, k and v")


def test_a_story_goes_when_the_setting_has_left_it(page: Any) -> None:
    note = page.locator(".play-note")
    told = note.inner_text()
    page.get_by_label("zig-zag").check()  # the story asks for it
    assert told and note.inner_text() == told
    page.get_by_label("full").check()
    assert note.inner_text() == ""
    page.get_by_label("causal").check()
    assert note.inner_text() == told


@pytest.mark.parametrize(("H", "K"), [(8, 128), (16, 32), (32, 32), (64, 1)])
def test_an_address_says_no_more_than_controls_can(site: Path, page: Any, H: int, K: int) -> None:
    opened(site, page, f"#H={H}&K={K}")
    most = min(H, K)
    assert page.locator("output[for=play-K]").inner_text() == str(most)
    assert f"&H={H}&K={most}&" in page.evaluate("location.hash")
    assert f"--heads {H} --kv-heads {most} " in page.locator(".play-commands").inner_text()


def test_a_turned_phone_keeps_the_comparison(page: Any, browser: Window) -> None:
    def width() -> int:
        return int(page.locator(".play-timeline svg").get_attribute("viewBox").split()[2])

    page.get_by_label("zig-zag").check()
    words = page.locator(".play-headline").inner_text()
    wide = width()
    resize(browser, 390)
    assert "times as fast" in words and page.locator(".play-headline").inner_text() == words
    assert width() < 400 < wide
    resize(browser, 1280)
    assert width() == wide


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_copy_of_a_block_waits_until_the_next_rank_takes_it(site: Path, page: Any, layout: str) -> None:
    """A copy of a block is under way, or waits, from its hop's start until its receiver begins to use it."""
    page.goto((site / "play.html").as_uri() + f"#layout={layout}&mask=causal&P=16&S=16&machine=h100")
    page.reload()
    wrong = page.evaluate("""() => {
      const machine = JSON.parse(document.getElementById("playground-choices").textContent).machines[0];
      const layout = new URLSearchParams(location.hash.slice(1)).get("layout");
      const s = { layout, causal: true, schedule: "ring", P: 16, S: 65536, H: 32, K: 8, D: 128, machine };
      const found = ringModel.simulate(s), [picture, follow] = playViews.ringView(s, found);
      const moving = [...picture.querySelectorAll(".play-moving")];
      const copies = Array.from({ length: 16 }, (_, rank) => moving.filter((each) => each.dataset.rank === String(rank)));
      let wrong = 0;
      for (let n = 0; n <= 400; n += 1) {
        const now = (n / 400) * found.makespan;
        follow(now);
        copies.forEach((copy, rank) => {
          const next = found.begins[(rank + 1) % 16];
          const due = found.hops[rank].filter(([start], step) => start <= now && now < next[step + 1]).length;
          if (due > 1 || copy.filter((each) => each.getAttribute("visibility") === "visible").length !== due) wrong += 1;
        });
      }
      return wrong;
    }""")
    assert wrong == 0


@pytest.mark.parametrize("P", [8, 16])
def test_messages_of_an_all_gather_are_seen_until_the_last_has_arrived(site: Path, page: Any, P: int) -> None:
    opened(site, page, f"#layout=zigzag&mask=causal&schedule=allgather&P={P}&S=15&machine=h100")
    seen = page.evaluate(
        """P => {
      const machine = JSON.parse(document.getElementById("playground-choices").textContent).machines[0];
      const s = { layout: "zigzag", causal: true, schedule: "allgather", P, S: 32768, H: 32, K: 8, D: 128, machine };
      const found = ringModel.simulate(s), [picture, follow] = playViews.ringView(s, found);
      const moving = [...picture.querySelectorAll(".play-moving")];
      const visible = () => moving.filter((each) => each.getAttribute("visibility") === "visible").length;
      const fetched = Math.max(...found.begins.map(([first]) => first)), wrong = [];
      for (let n = 0; n < 200; n += 1) {
        follow((n / 200) * fetched);
        const under = found.hops.flat().filter(([start, end]) => start <= (n / 200) * fetched && (n / 200) * fetched < end).length;
        if (visible() === 0 || visible() > under) wrong.push([n, visible(), under]);
      }
      follow(fetched);
      return { wrong, after: visible(), messages: found.hops.flat().length };
    }""",
        P,
    )
    assert seen == {"wrong": [], "after": 0, "messages": 2 * P * (P - 1)}
    assert "copies of all blocks travel to all ranks" in page.locator(".play-caption").inner_text()


@pytest.mark.parametrize("schedule", ["ring", "allgather"])
@pytest.mark.parametrize("P", [2, 3, 8])
def test_as_many_blocks_are_named_as_are_counted(site: Path, page: Any, P: int, schedule: str) -> None:
    """The number of blocks and the size in the legend agree: a block takes 4,096 bytes a token."""
    opened(site, page, f"#layout=contiguous&mask=full&schedule={schedule}&P={P}&S=14&H=32&K=8&machine=h100")
    legend = page.locator(".play-legend li").nth(1).inner_text()
    words, size = legend.rsplit(": ", 1)
    number, unit = size.split()
    blocks = float(number) * {"kB": 1e3, "MB": 1e6}[unit] / (-(-(2**14) // P) * 4096)
    named = {2: ("one block of another rank", "the other block")}.get(
        P, ("two blocks of others", f"all {P - 1} other blocks")
    )
    assert words == named[schedule == "allgather"]
    assert round(blocks, 1) == pytest.approx({"ring": min(2, P - 1), "allgather": P - 1}[schedule], abs=0.1)


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
    shown = [page.locator(f"output[for=play-{heads}]").inner_text() for heads in "HK"]
    assert shown == ["32", "32"]


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
        "#layout=contiguous&mask=causal&schedule=ring&P=24&S=16&H=32&K=8&machine=h100&speed=0",
        "#layout=striped&mask=causal&schedule=ring&P=2&S=12&H=8&K=1&machine=laptops&speed=-6",
        "#layout=contiguous&mask=causal&schedule=allgather&P=12&S=15&H=64&K=8&machine=b200&speed=2",
        "#layout=zigzag&mask=causal&schedule=ring&P=3&S=13&H=16&K=16&machine=h800&speed=-2",
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


@pytest.mark.parametrize("name", ["front", "play"])
def test_the_text_beside_the_playground_holds_for_every_setting(name: str) -> None:
    """The fixed text beside the playground has no number that depends on a setting."""
    text = (playground.TEXT.parent / f"{name}.md").read_text(encoding="utf-8").partition("{playground}")[0]
    beside = text.rpartition("\n#")[2]
    numbers = r"\d+|two|three|four|five|six|seven|eight|nine|ten|\w+teen|twice|half"
    assert re.findall(rf"\b(?:{numbers})\b", beside, re.IGNORECASE) == []
