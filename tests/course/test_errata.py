"""The errata page computes every number and refutes every claim. The tests find a wrong correction."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringlab_course.errata import page
from ringlab_course.errata.__main__ import main
from ringlab_course.errata.collection import GROUPS
from ringlab_course.errata.entry import Entry, Figure, Values

pytestmark = [pytest.mark.thorough, pytest.mark.needs_triton]  # one entry calls the compiler
PAGE = Path(__file__).resolve().parents[2] / "docs" / "errata.md"
AGAIN = "python -m ringlab_course.errata docs/errata.md"
ENTRIES = {entry.title: entry for group in GROUPS for entry in group.entries}
NAMES = re.compile(r"\b(A100s?|H100|NVLink \d|\d+B model|fp\d+|bf16|bfloat16|float\d+|\d+ bits)\b")


@pytest.fixture(scope="module")
def computed() -> Mapping[str, Values]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return page.compute()
    finally:
        torch.set_num_threads(threads)


def test_the_page_is_what_is_computed(computed: Mapping[str, Values]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page.page(computed), AGAIN


@pytest.mark.parametrize("title", ENTRIES)
def test_a_claim_is_refuted(title: str, computed: Mapping[str, Values]) -> None:
    assert ENTRIES[title].refuted(computed[title]) == []


@pytest.mark.parametrize("title", ENTRIES)
def test_a_computation_that_gave_what_was_claimed_would_be_noticed(
    title: str, computed: Mapping[str, Values]
) -> None:
    """`refuted` reports every refuted figure whose computed value is replaced by the claimed one."""
    entry, values = ENTRIES[title], computed[title]
    refuted = [figure for figure in entry.figures if figure.claimed is not None and not figure.holds]
    for figure in refuted:
        claimed = figure.claimed[0] if isinstance(figure.claimed, tuple) else figure.claimed
        assert any(figure.label in what for what in entry.refuted({**values, figure.key: claimed}))


@pytest.mark.parametrize("title", ENTRIES)
def test_no_number_of_a_text_is_typed_by_hand(title: str, computed: Mapping[str, Values]) -> None:
    """Every number in a text is a computed figure, or is in the claim or in the computation that is shown."""
    entry, values = ENTRIES[title], computed[title]
    known = page.source(entry) + json.dumps({key: str(value) for key, value in values.items()})
    known += " ".join(f" {each.claimed_text} {each.shown(values[each.key])}" for each in entry.figures)
    allowed = set(re.findall(r"\d+(?:\.\d+)?", known.replace(",", "").replace("_", "")))
    for text in (entry.title, entry.claim, entry.truth, entry.matters):
        plain = NAMES.sub("", re.sub(r"\{[^}]*\}|`[^`]*`", "", text)).replace(",", "")
        typed = {
            number
            for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", plain)
            if number not in ("0", "1")
        }
        assert typed <= allowed, f"{sorted(typed - allowed)} in {text!r}"


def test_a_wrong_correction_on_the_page_is_noticed(
    computed: Mapping[str, Values],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(page, "compute", lambda: computed)
    copy = tmp_path / "errata.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"))
    assert main([str(copy), "--check"]) == 0
    copy.write_text(copy.read_text().replace("| 16 | 15.00 |", "| 16 | 16.00 |"))
    capsys.readouterr()
    assert main([str(copy), "--check"]) == 1
    assert (
        "+| work of the last rank relative to the first, long shards | 16 | 15.00 |"
        in capsys.readouterr().out
    )
    assert main([str(copy)]) == 0
    assert copy.read_text() == PAGE.read_text(encoding="utf-8")


def test_an_entry_without_a_refuted_figure_is_none() -> None:
    entry = replace(next(iter(ENTRIES.values())), figures=(Figure("error", "error", 0.0, holds=True),))
    assert entry.refuted({"error": 0.0}) == ["no figure is claimed to be another one"]
    assert len(entry.refuted({"error": 0.5})) == 2


@pytest.mark.parametrize(
    ("claimed", "value", "agrees"),
    [
        (16, 15.0, False),
        (16, 16.3, True),
        (24.18, 24.205, False),
        (24.18, 24.184, True),
        (0.0, float("nan"), False),
        (True, False, False),
        (False, False, True),
        ((1.0, 2.0), 1.5, True),
        ((1.0, 2.0), 0.82, False),
    ],
)
def test_agreement_is_to_the_last_digit_that_was_claimed(claimed: object, value: float, agrees: bool) -> None:
    assert Figure("x", "x", claimed).agrees(value) is agrees


def test_what_is_shown() -> None:
    assert Figure("x", "x", 1024).claimed_text == "1,024"
    assert (
        Figure("x", "x", 0.0).claimed_text,
        Figure("x", "x").claimed_text,
        Figure("x", "x", (1.0, 2.0)).claimed_text,
    ) == (
        "0",
        "–",
        "1.0 to 2.0",
    )
    assert (Figure("x", "x").shown(True), Figure("x", "x").shown(3e-16)) == ("yes", "below 1e-12")
    entry = Entry("t", "{claimed.x}", "{x} of {n}", "", "01", (Figure("x", "x", 5, "{:.2f}"),), dict)
    assert (entry.filled(entry.claim, {"x": 4.0, "n": 7}), entry.filled(entry.truth, {"x": 4.0, "n": 7})) == (
        "5",
        "4.00 of 7",
    )


@pytest.mark.parametrize("title", ENTRIES)
def test_a_title_says_what_is_not_so(title: str) -> None:
    """No title reads as the claim that it refutes, because searches and lists of contents show titles alone."""
    assert re.search(r"\b(not|cannot|no|never)\b", title)


def test_links_lead_to_headings_and_notebooks() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith(("## ", "### "))
    }
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for entry in text.split("\n### ")[1:]:
        assert "](../notebooks/" in entry, entry.splitlines()[0]
    links = re.findall(r"\]\(([^)]+)\)", text)
    for link in links:
        assert (
            link.removeprefix("#") in headings if link.startswith("#") else (PAGE.parent / link).exists()
        ), link
