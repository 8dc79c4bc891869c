"""Pages of grades are complete and correct, safe from learners' text, and reveal no other learner's data."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.errors import CourseError, MissingExtraError
from ringlab_course.gradebook import pages
from ringlab_course.gradebook.entry import Entry, Ungraded
from ringlab_course.gradebook.readable import TEXT, points, prose
from tests.course.gradebook.page_checks import Page, faults
from tests.course.gradebook.sample_class import HIDDEN, SEED, WRONG, a_class, entry, graded, saying

pytestmark = pytest.mark.thorough

EVIL = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</pre></td></table></main><h1>36 of 36</h1>",
    "{{ 7 * 7 }}{% raw %}",
    "`<b>` $<i>$ $\\mathrm{x}$ $" + "{" * 500 + "$",
    "\u202egpj.exe \u2066\u200f \x1b[2J\x00\x07 \ud800",
    "--><style>*{display:none}</style>",
    "https://example.org/track.png",
)


def rendered(tmp_path: Path, entries: list[Entry], **more) -> dict[str, str]:
    """Write the pages of `entries`, and return the text of each page by its path below the folder."""
    paths = pages.write_pages(entries, tmp_path, "A class", **more)
    return {path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def page_of(texts: dict[str, str], learner: str) -> Page:
    return Page(texts[f"learners/{pages.page_name(learner)}"])


def test_every_check_and_its_score_is_on_the_learners_page() -> None:
    for stem in WRONG:
        made = entry("Ada", stem)
        page = Page(pages.learner_page("Ada", [made], "A class"))
        rows = [row.text for row in page.all("tr")]
        for stage in made.report["stages"]:
            for check in stage["checks"]:
                title = re.sub(r"\s+", " ", Page(str(prose(check["title"]))).text)
                (row,) = [r for r in rows if title in re.sub(r"\s+", " ", r) and f"of {check['points']}" in r and _state(stage, check) in r][:1]  # fmt: skip
                assert f"{check['points'] if check['ok'] else 0} of {check['points']}" in row
                if not check["ok"] and check["misconception"]:
                    assert check["misconception"].replace("_", " ") in page.text


def _state(stage: dict, check: dict) -> str:
    return "✓ holds" if check["ok"] else "– open" if stage["status"] == "not written" else "✗ fails"


def test_totals_equal_the_entries(tmp_path) -> None:
    entries = a_class()
    texts = rendered(tmp_path, entries)
    for made in entries:
        page = page_of(texts, made.learner)
        assert f"{points(made.score)} of {points(made.maximum)} points" in page.text
        if made.learner.startswith("Learner"):
            cells = [td.text for td in page.all("td") if td.attributes.get("class") == "number"]
            assert sum(float(cell.split()[0]) for cell in cells) == made.earned
            assert sum(float(cell.split()[2]) for cell in cells) == made.maximum
    index = Page(texts["index.html"])
    both = sum(made.score for made in entries if made.learner == "Ada")
    row = next(re.sub(r"\s+", " ", r.text) for r in index.all("tr") if r.text.strip().startswith("Ada"))
    assert row.split()[-1] == points(both)
    assert (
        page_of(texts, "Ada").text.count(f"{points(both)} of {points(36 + entries[-1].maximum)} points") == 1
    )


def test_lateness_overrides_and_reasons_are_told(tmp_path) -> None:
    texts = rendered(tmp_path, a_class())
    late = page_of(texts, "Late").text
    assert "Late by 2 h 30 min" in late and "− 2.5" in late
    assert "the projector caught fire (grace, 2026-11-21 20:37 UTC)" in page_of(texts, "Set").text
    assert "could not be graded. Broken JSON" in page_of(texts, "Unreadable").text
    assert "Unreadable: broken JSON" in Page(texts["index.html"]).text


def test_points_with_the_reference_helpers_are_told(tmp_path) -> None:
    report = {**graded(WRONG[0]), "earned_with_reference": graded(WRONG[0])["earned"] + 3}
    first, *others = report["stages"]
    report["stages"] = [{**first, "replaced": ("mask", "softmax"), "earned_again": 5}, *others]
    texts = rendered(tmp_path, [entry("Ada", report=report, helped=3.0)])
    page = page_of(texts, "Ada")
    assert "With the reference's mask and softmax, this stage earns 5 of 10 points." in page.text
    assert "+ 3" in page.text and "Earned in addition with the reference's functions" in page.text
    assert f'{report["earned"] + 3}<span class="marks quiet">H</span>' in texts["index.html"]
    own = page_of(rendered(tmp_path / "own", [entry("Ada", report=report, helped=0.0)]), "Ada")
    assert "this stage would earn 5 of 10 points." in own.text and "+ 3" not in own.text


def test_points_that_do_not_count_are_shown_as_none() -> None:
    report = {**graded(WRONG[0]), "reason": "it interfered with the judge", "earned": 0}
    page = Page(pages.learner_page("Eve", [entry("Eve", report=report)], "A class"))
    assert "0 of 36 points" in page.text and "Nothing in this submission counts" in page.text
    assert not page.all("details")
    assert not re.search(r"[1-9]\d* of \d+ points", page.text.replace("0 of 36 points", ""))


def test_pages_are_sound(tmp_path) -> None:
    for where, text in rendered(tmp_path, a_class()).items():
        assert faults(text) == [], where


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_a_learner_writes_steers_a_page(tmp_path, evil) -> None:
    report = saying(evil, evil, reason="", notes=[evil], label=evil)
    report["stages"][0]["checks"][0] |= {"misconception": evil, "title": evil, "id": evil}
    report["stages"].append({"stage": evil, "status": evil, "checks": report["stages"][0]["checks"]})
    texts = rendered(
        tmp_path, [entry(evil, report=report, path=evil, digest=evil, override=1.0, override_reason=evil)],
        ungraded=[Ungraded(evil + "2", evil, evil, evil, evil, evil)],
    )  # fmt: skip
    for where, text in texts.items():
        assert faults(text) == [], where
        assert Page(text).all("b") + Page(text).all("i") in ([], Page(text).all("b")[:3])
    shown = page_of(texts, evil).text
    assert "49" not in shown and len(Page(texts["index.html"]).all("style")) == 1


def test_a_megabyte_is_cut(tmp_path) -> None:
    report = saying("m" * 10**6, "c" * 10**6, notes=["n" * 10**6] * 100)
    texts = rendered(tmp_path, [entry("long " * 10**5, report=report)])
    assert max(map(len, texts.values())) < 100_000
    assert f"({10**6 - TEXT:,} more characters)" in page_of(texts, "long " * 10**5).text


def test_a_hidden_probe_and_a_seed_never_reach_a_learner(tmp_path) -> None:
    assert all(HIDDEN in str(graded(stem)) for stem in WRONG)
    for where, text in rendered(tmp_path, a_class()).items():
        assert HIDDEN not in text, where
        assert (str(SEED) in text) == (where == "index.html"), where


def test_a_tier_that_is_not_known_is_hidden() -> None:
    report = saying("wrong", HIDDEN)
    report["stages"][0]["checks"][0]["tier"] = "brand-new"
    assert HIDDEN not in pages.learner_page("Ada", [entry("Ada", report=report)], "A class")


SECRETS = {f"Learner{number}": f"secret{number}word" for number in range(4)}


def secretive() -> list[Entry]:
    """Return entries that contain each learner's secret in every field that can hold text."""
    return [
        entry(who, report=saying(said, said, notes=[said]), override=1.0, override_reason=said, path=said)
        for who, said in SECRETS.items()
    ]


def given_away(texts: dict[str, str]) -> list[str]:
    """Return a line for each learner's page that does not show its learner, or shows another learner."""
    hrefs = [a.attributes["href"] for a in Page(texts["index.html"]).all("a")]
    links = [href for href in hrefs if href.startswith("learners/")][
        : len(SECRETS)
    ]  # the links in the table of scores come first
    found = []
    for who, href in zip(SECRETS, links, strict=True):
        shown = {
            learner for learner, said in SECRETS.items() if said in texts[href] or learner in texts[href]
        }
        found += [] if shown == {who} else [f"{who}'s page shows {sorted(shown)}"]
    return found


def test_a_learners_page_shows_nobody_else(tmp_path) -> None:
    texts = rendered(tmp_path, secretive())
    assert given_away(texts) == []
    assert not any(
        a.attributes["href"].endswith(".html") for w in SECRETS for a in page_of(texts, w).all("a")
    )


def test_somebody_elses_entry_is_refused() -> None:
    with pytest.raises(CourseError, match="entries of one learner"):
        pages.learner_page("Ada", [entry("Ada"), entry("Grace")], "A class")


def test_writing_again_touches_nothing_and_learners_who_are_gone_are_gone(tmp_path) -> None:
    entries = a_class()
    before = {path: path.stat().st_mtime_ns for path in pages.write_pages(entries, tmp_path, "A class")}
    assert {path: path.stat().st_mtime_ns for path in pages.write_pages(list(reversed(entries)), tmp_path, "A class")} == before  # fmt: skip
    (tmp_path / "learners" / "notes.html").write_text("mine")
    (tmp_path / "learners" / ".unfinished-left").write_text("half")
    pages.write_pages([e for e in entries if e.learner != "Late"], tmp_path, "A class")
    left = {path.name for path in (tmp_path / "learners").iterdir()}
    assert pages.page_name("Late") not in left and ".unfinished-left" not in left and "notes.html" in left
    assert len(left) == len({e.learner for e in entries}) - 1 + 1


@pytest.mark.parametrize("kind", ["text", "link", "folder"])
def test_what_is_not_ours_is_never_overwritten(tmp_path, kind) -> None:
    precious = tmp_path / "elsewhere.html"
    precious.write_text("mine")
    target = tmp_path / "out" / "index.html"
    target.parent.mkdir()
    {
        "text": lambda: target.write_text("mine"),
        "link": lambda: target.symlink_to(precious),
        "folder": lambda: target.mkdir(),
    }[kind]()
    with pytest.raises(CourseError, match="not written by ringlab"):
        pages.write_pages(a_class(), tmp_path / "out", "A class")
    assert precious.read_text() == "mine" and len(list((tmp_path / "out").iterdir())) == 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(st.characters(), max_size=120), min_size=2, max_size=6, unique=True))
def test_file_names_are_safe_and_differ(names) -> None:
    made = [pages.page_name(each) for each in names]
    assert len({each.casefold() for each in made}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,56}-[0-9a-f]{16}\.html", each) for each in made)


def test_hints_come_one_rung_at_a_time_and_only_where_something_fails() -> None:
    page = Page(pages.learner_page("Ada", [entry("Ada", WRONG[0])], "A class"))
    failing = [s for s in graded(WRONG[0])["stages"] if s["status"] != "ok"]
    assert failing and len(page.all("details")) == 3 * len(failing)
    assert all("Hint 1 of 3" in d.text for d in page.all("details")[::3])
    assert not any("open" in d.attributes for d in page.all("details"))
    assert not Page(pages.learner_page("Ada", [entry("Ada")], "A class")).all("details")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_background(theme) -> None:
    """Contrast is at least 4.5 : 1 for text and 3 : 1 for marks in pictures (WCAG 2.2, 1.4.3 and 1.4.11)."""
    style = (Path(pages.__file__).parent / "templates" / "style.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", root)) for root in re.findall(r":root \{(.*?)\}", style, re.DOTALL))  # fmt: skip
    assert light.keys() == dark.keys()
    colours = light if theme == "light" else dark
    for text, least in {
        "ink": 7,
        "quiet": 4.5,
        "link": 4.5,
        "good": 4.5,
        "bad-text": 4.5,
        "bad": 3,
        "warn": 3,
    }.items():
        for ground in ("paper", "raised"):
            assert contrast(colours[text], colours[ground]) >= least, (text, ground)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_without_jinja2_the_remedy_is_told(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    pages.environment.cache_clear()
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'ringlab[instructor]'")):
        pages.environment()
    pages.environment.cache_clear()


# The tests below change the code of the pages, and expect that the tests above then fail.
