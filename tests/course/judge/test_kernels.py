"""Submissions with kernels run in Triton's interpreter inside the sandbox, and accesses are recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.protocol import ProtocolError
from ringlab_course.judge import records, sandbox
from ringlab_course.judge.session import Condemned, SandboxedSubject, Session

KERNELS = """
import os
import torch
import triton
import triton.language as tl

@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)

def copy(x):
    out = torch.empty_like(x)
    copy_kernel[(triton.cdiv(len(x), 4),)](x, out, len(x), BLOCK=4)
    return out

@triton.jit
def far_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + 1_000_000 + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))

def far(x):
    far_kernel[(1,)](x, BLOCK=4)
    return x

@triton.jit
def empty_kernel(x_ptr):
    raise NotImplementedError("the kernel")

def empty(x):
    empty_kernel[(1,)](x)

def setting():
    return os.environ.get("TRITON_INTERPRET", "")

def forged(x):
    import ringlab_course.judge.worker as worker
    worker.written_down = lambda accesses: {"names": ["x"]}
    return x
"""
FUNCTIONS = ["copy", "far", "empty", "setting", "forged"]


@pytest.fixture(scope="module")
def session():
    with Session([KERNELS], FUNCTIONS, torch=True, kernels=True) as session:
        yield session


@pytest.mark.needs_bwrap
@pytest.mark.needs_triton
def test_a_kernel_runs_in_the_interpreter_and_its_accesses_arrive(session) -> None:
    x = torch.arange(6.0)
    recorded = SandboxedSubject(session, "copy").record(x)
    assert torch.equal(recorded.answer, x)
    seen = [
        (a.program[0], a.kind, a.argument, a.offsets.tolist(), a.shape, a.masked) for a in recorded.accesses
    ]
    assert seen == [
        (0, "load", "x_ptr", [0, 1, 2, 3], (4,), 0),
        (0, "store", "out_ptr", [0, 1, 2, 3], (4,), 0),
        (1, "load", "x_ptr", [4, 5], (4,), 2),
        (1, "store", "out_ptr", [4, 5], (4,), 2),
    ]


@pytest.mark.needs_bwrap
@pytest.mark.needs_triton
def test_a_store_outside_of_its_tensor_is_a_message_not_a_crash(session) -> None:
    with pytest.raises(Crashed, match="outside of a tensor's memory") as caught:
        SandboxedSubject(session, "far").call(torch.zeros(4))
    assert "far_kernel" in caught.value.counterexample
    assert session.losses == 0


@pytest.mark.needs_bwrap
@pytest.mark.needs_triton
def test_only_workers_of_kernels_have_the_interpreter_on(session) -> None:
    assert SandboxedSubject(session, "setting").call() == "1"
    plain = "import os\ndef setting():\n    return os.environ.get('TRITON_INTERPRET', '')"
    with Session([plain], ["setting"], torch=False) as other:
        assert SandboxedSubject(other, "setting").call() == ""
    assert "TRITON_INTERPRET" not in sandbox.environment()


@pytest.mark.needs_bwrap
@pytest.mark.needs_triton
def test_records_of_another_form_end_the_submission() -> None:
    with Session([KERNELS], FUNCTIONS, torch=True, kernels=True) as session:
        with pytest.raises(Condemned):
            SandboxedSubject(session, "forged").record(torch.zeros(4))
        assert session.condemned


def good() -> dict:
    return {
        "names": ["x"],
        "programs": np.zeros((2, 3), np.int64),
        "kinds": np.array([0, 1]),
        "arguments": np.zeros(2, np.int64),
        "masked": np.zeros(2, np.int64),
        "shapes": np.full((2, 1), 2),
        "lengths": np.array([2, 1]),
        "offsets": np.array([4, 5, 4]),
    }


def test_records_are_what_they_were() -> None:
    _, accesses = records.taken_in((None, good()))
    again = records.written_down(accesses)
    assert all(np.array_equal(again[key], part) for key, part in good().items())


@pytest.mark.parametrize(
    "change",
    [
        {"names": "x"},
        {"kinds": np.array([0, 2])},
        {"arguments": np.array([0, 1])},
        {"lengths": np.array([2, 2])},
        {"offsets": np.array([4.0, 5.0, 4.0])},
        {"lengths": np.array([(1 << 63) - 1, (1 << 63) - 1])},
        {
            **{
                key: np.repeat(part[:1], records.MOST + 1, axis=0)
                for key, part in good().items()
                if key != "names"
            },
            "lengths": np.ones(records.MOST + 1, np.int64),
        },
        {"more": 1},
    ],
)
def test_malformed_records_are_refused(change) -> None:
    with pytest.raises(ProtocolError):
        records.taken_in((None, good() | change))
    with pytest.raises(ProtocolError):
        records.taken_in(good() | change)
