"""No step of a ring on GPUs makes Python wait for the GPU.

Fake tensors have shapes and no data. Autograd without CUDA needs them on the CPU, where the blocks take them
for tensors on a GPU. So every use of a value counts as a wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ringlab import Mask, ring_attention
from ringlab.bench.contenders import Alone
from ringlab.blocks import blockwise, naive, native
from ringlab.blocks.triton import visits
from ringlab.comm.ring import Ring
from ringlab.layout import zigzag
from ringlab.schedules import available as schedules
from ringlab.schedules import ulysses
from tests.blocks.device_calls import flash_attn_packages, triton_launches

P, S = 4, 128
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "documents": Mask(documents=(40, 0, 1, 87)),
    "window": Mask(window=40),
}
aten = torch.ops.aten
NEEDS_VALUES = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.equal.default: "equal",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
}
"""Operators whose result on the CPU, or whose shape, depends on the values of a tensor."""


class Waits(TorchDispatchMode):
    """Collects the operators that would make Python wait for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def copying(self, name: str) -> Any:
        """Return this method of tensors, changed to record its name before it does its work."""
        before = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.found.append(name)
            return before(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NEEDS_VALUES:
            self.found.append(NEEDS_VALUES[func])
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_gpu(block: str) -> Iterator[Waits]:
    """Have `block` compute fake tensors on a GPU, whose kernels do nothing; yield what Python would wait for."""
    waits = Waits()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(
            flash_attn_packages(2, tell=lambda operator, call: None)
        )  # bounds have no data here
        stack.enter_context(mock.patch.object(native, "on_cuda", lambda x: True))
        stack.enter_context(mock.patch.object(naive, "_read_at_once", lambda x: False))
        for name in ("cuda.synchronize", "cuda.Stream.synchronize", "cuda.Event.synchronize"):
            stack.enter_context(mock.patch(f"torch.{name}", lambda *_: waits.found.append("synchronize")))
        for name in ("cpu", "numpy", "tolist"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, waits.copying(name)))
        # The ranks' flags are bytes on the CPU. Here they would also be fake.
        stack.enter_context(mock.patch.object(ulysses, "on_any_rank", lambda comm, here: here))
        if block == "triton":
            stack.enter_context(triton_launches())
            # On a CPU, Triton's interpreter asks whether V is finite.
            stack.enter_context(mock.patch("torch.isfinite", lambda x: SimpleNamespace(all=lambda: True)))
            stack.enter_context(mock.patch.object(visits.Visits, "on_this_stream", lambda self: self))
            for table in (
                visits.row_visits,
                visits.key_visits,
            ):  # no other test may find these tables of fake tensors
                table.cache_clear()
                stack.callback(table.cache_clear)
        stack.enter_context(waits)
        yield waits


def waited_for(block: str, schedule: str, mask: Mask, D: int = 64, of: tuple[str, ...] = ()) -> list[str]:
    """Return what Python would wait for in a forward and a backward of one of P ranks.

    of: the results that have a gradient, "out" and "lse", of a call that returns both; by default only out is returned.
    """
    with fake_gpu(block) as waits:
        layout, ring = zigzag(S, P), Ring(Alone(1, P))
        shape = (1, 4, len(layout.positions(1)), D)
        q, k, v, dout = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        result = ring_attention(
            *leaves, ring=ring, layout=layout, mask=mask, block=block, schedule=schedule, validate=False,
            return_lse=bool(of),
        )  # fmt: skip
        out, lse = result if isinstance(result, tuple) else (result, None)
        losses = [x for name, x in (("out", out), ("lse", lse)) if name in (of or ("out",))]
        given = [dout if x is out else torch.ones_like(x) for x in losses]
        found = torch.autograd.grad(losses, leaves, given)
        assert out.shape == q.shape and [x.shape for x in found] == [x.shape for x in leaves]
    return waits.found


pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
BLOCKS = (
    "native",
    "cudnn",
    "flash",
    "blockwise",
    pytest.param("triton", marks=pytest.mark.needs_interpreter),
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_ring_step_waits_for_nothing(block: str, mask: str) -> None:
    assert waited_for(block, "ring", MASKS[mask]) == []


@pytest.mark.parametrize("schedule", [name for name in schedules() if name != "ring"])
def test_no_schedule_waits(schedule: str) -> None:
    assert waited_for("native", schedule, MASKS["causal"]) == []


@pytest.mark.parametrize("of", [("out",), ("lse",), ("out", "lse")], ids=str)
@pytest.mark.parametrize("schedule", schedules())
def test_a_returned_lse_makes_nobody_wait(schedule: str, of: tuple[str, ...]) -> None:
    assert waited_for("native", schedule, MASKS["causal"], of=of) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("float(q.sum()); ", "item"),
        ("torch.nonzero(q); ", "nonzero"),
        ("q.cpu(); ", "cpu"),
        ("torch.cuda.synchronize(); ", "synchronize"),
    ],
)
def test_a_wait_is_found(code: str, found: str) -> None:
    forward = blockwise.Blockwise.forward

    def waiting(self: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(DynamicOutputShapeException, DataDependentOutputException):
            exec(code, {"torch": torch, "q": q})
        return forward(self, q, *args, **kwargs)

    with mock.patch.object(blockwise.Blockwise, "forward", waiting):
        assert set(waited_for("blockwise", "ring", MASKS["causal"])) == {found}


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_the_naive_block_gives_the_same_without_a_look_at_its_values(value: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 7, 8, generator=generator) for _ in range(3))
    v[:, 1, 5, 3] = value
    looked = naive.Naive().forward(q, k, v, causal=True, scale=0.3)
    with mock.patch.object(naive, "_read_at_once", lambda x: False):
        blind = naive.Naive().forward(q, k, v, causal=True, scale=0.3)
    assert torch.equal(torch.nan_to_num(looked.out), torch.nan_to_num(blind.out))
    assert torch.equal(looked.lse, blind.lse) and bool(blind.out[:, :, :5].isfinite().all())
