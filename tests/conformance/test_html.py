"""A report's HTML page escapes its texts, loads nothing, and shows the fault in pictures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.report import diagnosis
from ringlab.conformance.report.counterexample import located, wide_runs
from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.report.html import command_for, html
from ringlab.conformance.report.text import markdown
from ringlab.conformance.run.run import Run
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.suite import check

HOSTILE = "<script>alert('x')</script>\"&\x00<img src=//host.example/x onerror=alert(1)>"


ALONE = {"meta", "rect", "path"}


HALF_OF_DK = "tests.conformance.wrong_values:half_of_dk"


class Page(HTMLParser):
    """A parser that collects a page's elements and texts, and fails if opening and closing tags differ."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ALONE or tag in ("rect", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def of(mutant: str, *only: str) -> Report:
    return check(f"ringlab.conformance.mutants:{mutant}", quick=True, only=only, isolate=False)


def shown(mutant: str, name: str, counter: Run) -> dict[str, Any]:
    """Return where the values of the first wide run are wrong."""
    run = wide_runs(counter, (name,), (2, 3, 4))[0]
    where: Any = located(on_virtual_ranks(MUTANTS[mutant].target(), run))
    return dict(where)


def test_nothing_of_the_target_is_taken_for_html() -> None:
    finding = Finding(HOSTILE, HOSTILE, False, HOSTILE, 0.0, counterexample=HOSTILE)
    report = Report(HOSTILE, HOSTILE, HOSTILE, True, 0, 30.0, [finding], options=HOSTILE, no_script=HOSTILE)
    page = Page(html(report))
    assert page.named("script") == page.named("img") == [] and "\x00" not in page.text
    assert page.text.count("<script>alert('x')</script>") >= 5
    report.script = HOSTILE
    assert Page(html(report)).named("script") == []


@pytest.mark.parametrize("mutant", ["sees_one_too_many", "skips_the_last_block"])
def test_a_page_stands_alone_and_can_be_read_without_its_pictures(mutant: str) -> None:
    report = of(mutant, "forward", "masks")
    page = Page(html(report))
    for attributes in (each for _, each in page.tags):
        assert not {*attributes} & {"src", "href", "onclick", "onload"}
    assert not re.search(r"url\(|@import|https?://", html(report))
    pictures = page.named("svg")
    assert pictures and all(each["role"] == "img" and len(each["aria-label"] or "") > 30 for each in pictures)
    assert diagnosis.first(report.findings) in page.text and diagnosis.beside(report.findings) in page.text
    assert "prefers-color-scheme: dark" in html(report)
    assert {each.get("scope") for each in page.named("th")} == {"row", "col"}


def test_failed_checks_come_first() -> None:
    text = Page(html(of("sees_one_too_many", "forward", "masks"))).text
    table = text[text.index("All checks") :]
    assert table.index("masks") < table.index("loads") < table.index("forward")


def test_a_right_ring_has_a_page_without_pictures() -> None:
    report = check("ringlab.plain_ring:attend", quick=True, only=("forward",), isolate=False)
    page = Page(html(report))
    assert "All checks passed" in page.text and page.named("svg") == [] and "Reproduce" not in page.text


def test_the_picture_has_a_cell_for_each_wrong_pair() -> None:
    where = shown("sees_one_too_many", "out", Run(2, 48, "zigzag", True))
    wrong = sum(
        value is None or abs(value) > where["pairs"]["bound"]
        for row in where["pairs"]["difference"]
        for value in row
    )
    finding = Finding("masks", "asks", False, "wrong", 0.0, where={"smallest": where, "shown": where})
    page = html(Report("a:b", "ring", "virtual", True, 0, 30.0, [finding]))
    drawn = re.findall(r'<rect class="(?:more|less|nan)" [^>]*height="10"', page)
    assert "In the order of the sequence" in page and len(drawn) == 2 * wrong > 0


def test_nan_has_a_colour_of_its_own_and_reads_as_such() -> None:
    where = shown("sees_one_too_many", "out", Run(2, 48, "contiguous", True))
    where["pairs"]["difference"][0][0] = None
    where["results"][0] |= {"error": None, "by_token": [None, *where["results"][0]["by_token"][1:]]}
    finding = Finding("masks", "asks", False, "wrong", 0.0, where={"smallest": where, "shown": where})
    assert "error NaN or infinite" in diagnosis.first([finding])
    assert html(Report("a:b", "ring", "virtual", True, 0, 30.0, [finding])).count('class="nan"') == 2


@pytest.mark.thorough
def test_the_first_sentence_comes_before_the_table(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    asked = ["check", HALF_OF_DK, "--quick", "--only", "dk", "--ranks", "2,3", "--html", str(file)]
    done = CliRunner().invoke(app, asked)
    said = "dk is wrong on rank 0 of 2: token 0, with P = 2"
    assert done.exit_code == 1 and " ".join(done.stdout.split()).startswith(said)
    page = Page(file.read_text()).text
    assert said in page and f"ringlab check {HALF_OF_DK} --only dk --seed 0 --quick --ranks 2,3" in page
    assert "def on_rank(rank, ring=None):" in page


def raises(ring, q, k, v, *, causal, positions):  # type: ignore[no-untyped-def]
    if ring.rank == 1:
        raise ValueError("no <such> thing")
    return ring.shift(q)


def test_a_raise_is_said_with_its_rank() -> None:
    report = check(raises, quick=True, only=("forward", "dk"), isolate=False, ranks=(2,))
    said = "The target raises on rank 1, with P = 2, S = 48, contiguous, no mask, 5 sequences: ValueError: no <such> thing."
    assert diagnosis.first(report.findings) == said
    assert said.replace("<", "&lt;") in markdown(report) and said in Page(html(report)).text
    assert command_for(report, "forward") == ""


@pytest.mark.parametrize(("kind", "target"), [("merge", "tests.conformance.test_report:half_a_merge")])
def test_other_kinds_have_a_page_too(kind: str, target: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["check", target, "--kind", kind, "--html", str(file), "--json"])
    page = Page(file.read_text())
    assert done.exit_code == 1 and "The check 'values' fails:" in page.text and f"--kind {kind}" in page.text
