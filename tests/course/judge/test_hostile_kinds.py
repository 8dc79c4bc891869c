"""What the hostile submissions are about: every kind of attack that was thought of has several."""

from __future__ import annotations

import pytest

from tests.course.judge.hostile import BY_KIND, kernels, measures, rings
from tests.course.judge.hostile.files import FILES

KINDS = (
    "overwriting check functions and NumPy", "forging replies on the pipe", "evil array subclasses",
    "walking stacks, frames and memory", "reading tests, gradebook or other submissions", "writing anywhere", "network",
    "kill(-1)", "fork bombs", "setsid orphans", "memory bombs", "disk bombs", "1 GB of output",
    "infinite loops with signals ignored", "os._exit and other ends", "import hooks", "ctypes", "pickles",
    "threads left behind", "time bombs at import", "symlinked or enormous notebooks", "broken JSON", "non-UTF-8",
    "duplicated, renamed, retyped or missing cells", "output-only edits", "magic and shell cells",
)  # fmt: skip
TABLE = {
    **BY_KIND,
    **FILES,
    "frames forged in a ring": rings.FORGING,
    "rings that stay": rings.STAYING,
    "wires beside the ring": rings.WIRES,
    "meters dodged": rings.DODGING,
    "kernels": kernels.SUBMISSIONS,
    "memory hidden from its measure": measures.SUBMISSIONS,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_several_submissions(kind) -> None:
    assert len(TABLE[kind]) >= 2


def test_there_are_many_and_no_two_are_the_same() -> None:
    assert set(KINDS) <= set(TABLE)
    handed_in = [
        repr(each) for group in {**BY_KIND, "rings": rings.SUBMISSIONS}.values() for each in group.values()
    ]
    assert len(set(handed_in)) == len(handed_in) >= 200
    assert sum(map(len, TABLE.values())) >= 280
