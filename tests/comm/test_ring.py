"""The neighbour view of a transport, for what every transport has in common."""

from __future__ import annotations

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.errors import ShapeError


def test_posting_what_shift_returned_without_unpacking_it_says_so():
    def program(ring):
        pair = ring.shift(torch.zeros(1, 2), torch.ones(1, 2))
        return ring.shift(pair)

    with pytest.raises(ShapeError) as failed:
        VirtualCluster(2).run(program)
    assert failed.value.got == "a tuple of 2" and "k, v = ring.shift(k, v)" in failed.value.remedy
