"""`record_accesses` reports exactly the accesses that a kernel makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringlab_course.checking.accesses import Access, record_accesses

pytestmark = pytest.mark.needs_interpreter


@pytest.fixture(scope="module")
def kernels() -> Any:
    from tests.blocks import access_kernels

    return access_kernels


def summary(access: Access) -> tuple[Any, ...]:
    return access.program, access.kind, access.argument, access.offsets.tolist(), access.shape, access.masked


def test_names_of_views_of_one_tensor(kernels: Any) -> None:
    """Views interleaved in one tensor, such as q, k and v, are told apart by the origin of their pointers."""
    packed = torch.arange(48.0).reshape(4, 3, 4)
    q, k = packed[:, 0], packed[:, 1]
    out = torch.empty(4, 4)
    with record_accesses() as accesses:
        kernels.add_rows[(2, 2)](q, k, out, q.stride(0), ROWS=2, COLUMNS=2)
    assert torch.equal(out, q + k)
    mine = [summary(access) for access in accesses if access.program == (1, 0, 0)]
    rows = [24, 25, 36, 37]  # columns 0 and 1 of rows 2 and 3; a row begins every 12 elements
    assert mine == [
        ((1, 0, 0), "load", "q", rows, (2, 2), 0),
        ((1, 0, 0), "load", "k", rows, (2, 2), 0),
        ((1, 0, 0), "store", "out", [8, 9, 12, 13], (2, 2), 0),
    ]


def test_loaded_numbers_loops_and_atomics(kernels: Any) -> None:
    bounds, total = torch.tensor([1, 3], dtype=torch.int32), torch.zeros(1)
    with record_accesses() as accesses:
        kernels.count[(1,)](bounds, torch.arange(4.0), total)
    assert total.item() == 1 + 2
    said = [(access.kind, access.argument, access.offsets.tolist()) for access in accesses]
    assert said == [
        ("load", "bounds", [0]),
        ("load", "bounds", [1]),
        ("load", "x", [1]),
        ("load", "x", [2]),
        ("load", "total", [0]),
        ("store", "total", [0]),
    ]
