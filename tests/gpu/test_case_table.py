"""The case table on a GPU: every block there, against the float64 oracle, within the CPU's bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.conformance.cases import Case, attend, covering, join
from ringlab.conformance.tolerance import NAMES
from tests.substrates.test_case_table import RULED, beyond, program

DTYPES = {"triton": ("float32", "bfloat16", "float16"), "native": ("bfloat16", "float16")}
"""What each block takes on CUDA; the table's float64 is for CPUs."""


def cases(block: str) -> list[Case]:
    """Return every case of the table in each dtype of the block."""
    return list(dict.fromkeys(replace(case, dtype=dtype) for case in covering() for dtype in DTYPES[block]))


TABLE = [(block, "ring", case) for block in DTYPES for case in cases(block)]
TABLE += [(block, "allgather", case) for block in DTYPES for case in cases(block)[::5]]


SCORED = [
    (block, schedule, case, kind)
    for block in DTYPES
    for number, case in enumerate(cases(block)[::5])
    for schedule, kind in [(("ring", "allgather")[number % 2], RULED[number % 3])]
]


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("block", "schedule", "case"), TABLE, ids=str)
def test_on_the_gpu(block: str, schedule: str, case: Case) -> None:
    cluster = VirtualCluster(case.P, memory=False)
    results = join(case, cluster.run(attend, case, block, schedule, "cuda").results)
    assert results.out.device.type == "cuda"
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert results.lse.dtype == torch.float32
    assert beyond(case, results) == {}


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("block", "schedule", "case", "kind"), SCORED, ids=str)
def test_soft_caps_and_dropout_on_the_gpu(block: str, schedule: str, case: Case, kind: str) -> None:
    """The GPU drops the pairs of tests/philox.py, and blockwise computes native's tiles."""
    cluster = VirtualCluster(case.P, memory=False)
    results = join(case, cluster.run(program, case, block, schedule, kind, "cuda").results)
    assert results.out.device.type == "cuda"
    assert beyond(case, results, kind) == {}


@pytest.mark.needs_cuda
@pytest.mark.parametrize("block", DTYPES)
def test_the_same_bits_every_time(block: str) -> None:
    """Two runs give the same bits, except for dq of torch's own backward, which adds with atomics."""
    case = Case("zigzag", P=4, S=97, group=2, D=64, dtype="bfloat16", mask="causal")
    cluster = VirtualCluster(case.P, memory=False)
    first, second = (join(case, cluster.run(attend, case, block, "ring", "cuda").results) for _ in range(2))
    for name in NAMES if block == "triton" else ("out", "lse"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
