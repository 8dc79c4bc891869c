"""The same case table for the Triton block, with all new memory NaN: an unwritten row shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.blocks.protocol import Block
from ringlab.conformance.cases import AXES, Case, attend, covering, join
from ringlab.conformance.tolerance import NAMES, Results
from tests.blocks.compiled import small_tiles
from tests.substrates.test_case_table import assert_within_bounds

pytestmark = pytest.mark.needs_triton

# A window goes tile by tile, and layouts of single tokens make hundreds of tiles, each of milliseconds.
TOO_MANY = {
    ("token-fold", "window-both"),
    ("striped", "window-both"),
    ("token-fold", "window"),
    ("striped", "window"),
}
CASES = [case for case in covering() if case.dtype != "float64" and (case.layout, case.mask) not in TOO_MANY]
# Tiles of 16 and 32 give every program several tiles, with and without a mask; few, for each takes its time.
SMALL = [
    Case("zigzag", 2, 131, 2, 40, "float32", "causal"),
    Case("token-fold", 2, 97, 1, 16, "bfloat16", "causal"),
    Case("chunk-5-folded", 2, 64, 2, 80, "float16", "causal"),
    Case("contiguous", 3, 64, 1, 64, "float16", "full"),
    Case("striped", 3, 131, 2, 96, "float32", "causal"),
    Case("zigzag", 1, 64, 1, 192, "bfloat16", "causal"),
    Case("zigzag", 2, 97, 2, 40, "float32", "packed"),
    Case("contiguous", 2, 64, 1, 16, "bfloat16", "documents"),
    Case("zigzag", 2, 64, 2, 64, "float32", "prefix"),
    Case("contiguous", 2, 97, 1, 40, "float32", "window"),
]


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Iterator[None]:
    """torch.empty gives NaN, so that whatever nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def on_virtual_ranks(case: Case, block: str | Block, schedule: str = "ring") -> Results:
    outcome = VirtualCluster(case.P, memory=False).run(attend, case, block, schedule)
    return join(case, outcome.results)


def test_every_value_of_every_axis_is_met() -> None:
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in CASES} == set(values) - {"float64"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_virtual_ranks(case: Case) -> None:
    results = on_virtual_ranks(case, "triton")
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert results.lse.dtype == torch.float32
    assert_within_bounds(case, results)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_several_programs_and_tiles(case: Case) -> None:
    assert_within_bounds(case, on_virtual_ranks(case, small_tiles()))


def test_both_schedules_and_two_runs_give_the_same_bits() -> None:
    """Nothing is added in an order that differs from run to run; and the forward of both schedules is one."""
    case = SMALL[0]
    ring, again, gathered = (
        on_virtual_ranks(case, small_tiles(), schedule) for schedule in ("ring", "ring", "allgather")
    )
    for name, one, other in zip(NAMES, ring, again, strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(ring.out, gathered.out) and torch.equal(ring.lse, gathered.lse)
    assert_within_bounds(case, gathered)
