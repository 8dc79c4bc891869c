"""The page of errors has the texts of the code, with an ellipsis for each inserted value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.website import errors
from tools.website.links import escape

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]


def test_nearly_every_error_that_ringlab_raises_is_on_the_page() -> None:
    page, said = errors.page(CHECKOUT), errors.messages(CHECKOUT)
    for each in said:
        assert escape(each.needed).replace("|", r"\|").replace("\n", " ") in page.replace(r"\\|", r"\|")
    names = "|".join({each.error for each in said})
    raised = [
        call
        for path in (CHECKOUT / "ringlab").rglob("*.py")
        for call in re.findall(rf"\braise (?:\w+\.)?(?:{names})\(", path.read_text(encoding="utf-8"))
    ]
    assert len(said) > 0.9 * len(raised) > 300
