"""Every schedule gives a block that computes whole steps as many as were announced, also where a mask saves some."""

from __future__ import annotations

import pytest
import torch

from ringlab.errors import ShapeError
from ringlab.layout import contiguous
from ringlab.mask import Mask
from ringlab.schedules import available
from ringlab.schedules.ring import RingSchedule
from tests.schedules.problems import Problem, assert_equals_the_oracle, solve

pytestmark = pytest.mark.needs_triton
FEW = Problem(contiguous(24, 4), 4, 2, Mask(documents=(12, 9, 3)), D=16, dtype=torch.float32)


@pytest.mark.parametrize("schedule", available())
def test_documents_that_save_hops(schedule: str) -> None:
    assert_equals_the_oracle(solve(FEW, schedule, block="triton"), FEW)


def test_a_count_that_is_too_large_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is written out at the last block: one that never comes leaves nothing."""
    monkeypatch.setattr(RingSchedule, "block_count", lambda self, call: call.block_count + 1)
    with pytest.raises(ShapeError, match="lse of shape"):
        assert_equals_the_oracle(solve(FEW, "ring", block="triton"), FEW)
