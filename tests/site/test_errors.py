"""The page of errors: what the code says, with an ellipsis for what it fills in."""

from __future__ import annotations

from pathlib import Path

from tools.website import errors

CHECKOUT = Path(__file__).resolve().parents[2]


def test_messages_are_read_as_they_stand(tmp_path: Path) -> None:
    code = tmp_path / "ringlab" / "part.py"
    code.parent.mkdir()
    code.write_text(
        'def f(P):\n    raise ShapeError(f"one of {P} " + "things", repr(P), remedy="count them")\n'
        '    raise errors.MaskError(needed="a mask")\n    raise ValueError("not ours")\n    raise ShapeError(text)\n'
    )
    assert errors.messages(tmp_path) == [
        errors.Message("ShapeError", "one of … things", "count them", "ringlab.part"),
        errors.Message("MaskError", "a mask", "", "ringlab.part"),
    ]


def test_every_error_that_is_raised_in_ringlab_is_on_the_page() -> None:
    page = errors.page(CHECKOUT)
    said = errors.messages(CHECKOUT)
    assert len(said) > 400
    assert {each.error for each in said} == {line[3:] for line in page.splitlines() if line.startswith("## ")}
    for each in said:
        assert f"`{each.module}`" in page
