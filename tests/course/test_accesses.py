"""`record_accesses` reports exactly the accesses that a kernel makes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ringlab.errors import BackendError
from ringlab_course.checking.accesses import Access, record_accesses

pytestmark = pytest.mark.needs_interpreter


@pytest.fixture(scope="module")
def kernels() -> Any:
    from tests.blocks import access_kernels

    return access_kernels


def summary(access: Access) -> tuple[Any, ...]:
    return access.program, access.kind, access.argument, access.offsets.tolist(), access.shape, access.masked


def test_programs_offsets_and_masks(kernels: Any) -> None:
    x, y = torch.arange(10.0), torch.empty(10)
    with record_accesses() as accesses:
        kernels.copy[(3,)](x, y, 10, BLOCK=4)
    assert torch.equal(x, y)
    expected = []
    for program, offsets in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
        for kind, name in (("load", "x"), ("store", "y")):
            expected.append(((program, 0, 0), kind, name, offsets, (4,), 4 - len(offsets)))
    assert [summary(access) for access in accesses] == expected


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


def test_a_pointer_that_is_all_masked_keeps_its_name(kernels: Any) -> None:
    x, y = torch.arange(4.0), torch.empty(4)
    with record_accesses() as accesses:
        kernels.copy[(2,)](x, y, 4, BLOCK=4)
    assert summary(accesses[2]) == ((1, 0, 0), "load", "x", [], (4,), 4)


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


@pytest.mark.parametrize(("shift", "at"), ((0, 10), (-4, -4)))
def test_an_access_outside_of_its_argument_is_an_error(kernels: Any, shift: int, at: int) -> None:
    x, y = torch.arange(10.0), torch.full((16,), -1.0)
    with pytest.raises(Exception, match=f"element {at} of it") as failure, record_accesses() as accesses:
        kernels.unmasked_copy[(3,)](x, y, shift, BLOCK=4)
    assert isinstance(failure.value.__cause__, BackendError)
    assert failure.value.__cause__.needed == "a load within the memory of 'x'"
    assert all(access.argument in ("x", "y") for access in accesses)


def test_only_inside_and_only_of_this_thread(kernels: Any) -> None:
    x, y = torch.arange(4.0), torch.empty(4)

    def launch() -> None:
        kernels.copy[(1,)](x, y, 4, BLOCK=4)

    launch()
    with record_accesses() as outer:
        with record_accesses() as inner:
            launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    launch()
    assert [len(outer), len(inner)] == [0, 2]


def test_it_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringlab_course.checking.accesses.repair", lambda: False)
    with pytest.raises(BackendError, match="set TRITON_INTERPRET=1"), record_accesses():
        pass
