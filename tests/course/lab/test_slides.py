"""The slides of the run sheets contain every section and block, and no slide is cut off at its end."""

from __future__ import annotations

import re
from pathlib import Path

from tools.slides import LINES, deck, slides

CHECKOUT = Path(__file__).resolve().parents[3]


SHEET = (CHECKOUT / "docs/labs.md").read_text(encoding="utf-8")


def test_every_section_has_slides_in_its_order() -> None:
    headings = re.findall(r"^#+ (.+)$", SHEET, re.M)
    shown = [heading for heading, _ in slides(SHEET)]
    assert list(dict.fromkeys(shown)) == headings
    page = deck(SHEET)
    assert page.count("<section>") == len(shown) and "<table>" in page and "<pre>" in page


def test_what_does_not_fit_goes_on_the_next_and_no_block_is_cut() -> None:
    rows = "\n".join(f"| {n} | x |" for n in range(LINES - 3))
    shown = list(slides(f"# A\n\none\n\n| a | b |\n|---|---|\n{rows}\n\ntwo\n"))
    assert [heading for heading, _ in shown] == ["A", "A"]
    assert "one" in shown[0][1] and shown[0][1].count("<tr>") == LINES - 2 and "two" in shown[1][1]


def test_markup_of_the_page_is_text_on_the_slide() -> None:
    page = deck("# A <script>\n\n<script>alert(1)</script>\n")
    assert "<script>" not in page and "&lt;script&gt;" in page and "default-src 'none'" in page


def test_a_line_that_announces_a_block_is_on_its_slide() -> None:
    page = "# A\n\none\n\ntype:\n\n```sh\n" + "x\n" * (LINES - 3) + "```\n\nlast:\n\n# B\n\ntwo\n"
    shown = list(slides(page))
    assert [heading for heading, _ in shown] == ["A", "A", "A", "B"]
    assert "one" in shown[0][1] and "type:" not in shown[0][1]
    assert "type:" in shown[1][1] and "<pre>" in shown[1][1] and "last:" in shown[2][1]
    assert not any(body.rstrip().endswith(":</p>") for _, body in slides(SHEET))
