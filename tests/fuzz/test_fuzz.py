"""No input makes the judge crash: neither bytes from a worker's socket, nor a file in place of a notebook.

Input N of a seed depends only on the seed and N, so a failing number is enough to repeat it.
"""

from __future__ import annotations

import random
from collections import Counter
from types import ModuleType

import pytest

from tests.fuzz import frames, notebooks

pytestmark = pytest.mark.thorough
INPUTS = 6000


@pytest.mark.parametrize("target", [frames, notebooks], ids=["frames", "notebooks"])
def test_no_input_makes_it_crash(target: ModuleType) -> None:
    outcomes = Counter[str]()
    for number in range(INPUTS):
        drawn = target.draw(random.Random((7 << 40) + number))
        try:
            outcomes[target.check(drawn)] += 1
        except Exception as error:
            raise AssertionError(f"input {number}: {drawn!r:.500}") from error
    assert min(outcomes["read"], outcomes["refused"]) > INPUTS // 10, "inputs of one kind only"
