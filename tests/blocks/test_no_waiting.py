"""No step of a ring on GPUs makes Python wait for the GPU.

Fake tensors have shapes and no data. Autograd without CUDA needs them on the CPU, where the blocks take them for
tensors on a GPU. So every use of a value counts as a wait. Real tensors are on the host, and so is everything that Python
makes from numbers. `upload` alone may copy them to the GPU, because a copy from memory that is not pinned waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ringlab import Mask, ShardedCache, ring_attention
from ringlab.bench.contenders import Alone, _Done
from ringlab.blocks import blockwise, flash, flex, naive, native
from ringlab.blocks.triton import visits
from ringlab.comm.ring import Ring
from ringlab.layout import zigzag
from ringlab.nn.attention import ContextParallelAttention
from ringlab.nn.context import Context
from ringlab.nn.loss import next_tokens
from ringlab.scan.halo import short_convolution
from ringlab.schedules import available as schedules
from ringlab.schedules import ulysses
from ringlab.scores import TileRules
from ringlab.serving import PagedCache
from ringlab.tile import Tile
from ringlab.upload import upload
from tests.blocks.device_calls import flash_attn_packages, rewritten, triton_launches

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


def caller() -> str:
    """Return the module of the code that called the function that calls this one."""
    return sys._getframe(2).f_globals.get("__name__", "")


class Waits(TorchDispatchMode):
    """Collects the operations that would make Python wait for the GPU. fake: the mode whose tensors are on the GPU."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake, self.found = fake, list[str]()

    def copying(self, name: str) -> Any:
        """Return this method of tensors, changed to record its name, for a tensor on the GPU, before it does its work."""
        before = getattr(Tensor, name)

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, FakeTensor):
                self.found.append(name)
            return before(tensor, *args, **kwargs)

        return method

    def making(self, name: str) -> Any:
        """Return this function that makes tensors from values, changed to record its name if a device is given."""
        before = getattr(torch, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            if not caller().startswith("ringlab"):
                return before(*args, **kwargs)
            if kwargs.get("device") is not None:
                self.found.append(name)
            with unset_fake_temporarily():
                return before(*args, **kwargs)

        return function

    def moving(self) -> Any:
        """Return `Tensor.to`, changed to record a copy from the host to a device, unless `upload` makes the copy."""
        before = Tensor.to

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            devices = [x for x in (*args, *kwargs.values()) if isinstance(x, (torch.device, str))]
            if isinstance(tensor, FakeTensor) or not devices:
                return before(tensor, *args, **kwargs)
            if caller() != upload.__module__:
                self.found.append("to")
            return self.fake.from_tensor(tensor)

        return to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        on_host = [x for x in tensors if not isinstance(x, FakeTensor)]
        if tensors and len(on_host) == len(tensors):
            with unset_fake_temporarily():
                return func(*args, **given[1])
        if func in NEEDS_VALUES:
            self.found.append(NEEDS_VALUES[func])
        if any(x.ndim for x in on_host):  # kernels take single numbers as arguments
            self.found.append("a copy")
        args, kwargs = tree_map_only(
            Tensor, lambda x: x if isinstance(x, FakeTensor) else self.fake.from_tensor(x), given
        )
        return func(*args, **kwargs)


@contextmanager
def fake_gpu(block: str) -> Iterator[Waits]:
    """Have `block` compute fake tensors on a GPU, whose kernels do nothing; yield what Python would wait for."""
    with ExitStack() as stack:
        waits = Waits(stack.enter_context(FakeTensorMode()))
        stack.enter_context(
            flash_attn_packages(2, tell=lambda operator, call: None)
        )  # bounds have no data here
        stack.enter_context(mock.patch.object(native, "on_cuda", lambda x: True))
        stack.enter_context(mock.patch.object(naive, "_read_at_once", lambda x: False))
        for name in ("cuda.synchronize", "cuda.Stream.synchronize", "cuda.Event.synchronize"):
            stack.enter_context(mock.patch(f"torch.{name}", lambda *_: waits.found.append("synchronize")))
        for name in ("cpu", "numpy", "tolist", "new_tensor"):
            stack.enter_context(mock.patch.object(Tensor, name, waits.copying(name)))
        for name in ("tensor", "as_tensor", "asarray", "from_numpy"):
            stack.enter_context(mock.patch.object(torch, name, waits.making(name)))
        stack.enter_context(mock.patch.object(Tensor, "to", waits.moving()))
        # The ranks' flags are bytes on the CPU. Here they would also be fake.
        stack.enter_context(mock.patch.object(ulysses, "on_any_rank", lambda comm, here: here))
        if block == "triton":
            stack.enter_context(triton_launches())
            # On a CPU, Triton's interpreter asks whether V is finite.
            stack.enter_context(mock.patch("torch.isfinite", lambda x: SimpleNamespace(all=lambda: True)))
            for table in (
                visits.row_visits,
                visits.key_visits,
            ):  # no other test may find these tables of fake tensors
                table.cache_clear()
                stack.callback(table.cache_clear)
        stack.enter_context(waits)
        yield waits


def waited_for(
    block: str, schedule: str, mask: Mask, D: int = 64, of: tuple[str, ...] = (), **rules: Any
) -> list[str]:
    """Return what Python would wait for in a forward and a backward of one of P ranks.

    rules: the soft cap, dropout and seed.
    of: which of "out" and "lse" have a gradient. The call returns lse only if `of` is given.
    """
    with fake_gpu(block) as waits:
        layout, ring = zigzag(S, P), Ring(Alone(1, P))
        shape = (1, 4, len(layout.positions(1)), D)
        q, k, v, dout = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        result = ring_attention(
            *leaves, ring=ring, layout=layout, mask=mask, block=block, schedule=schedule, validate=False,
            return_lse=bool(of), **rules,
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


@pytest.mark.parametrize("block", BLOCKS)
def test_dropout_waits_for_nothing(block: str) -> None:
    assert waited_for(block, "ring", MASKS["causal"], dropout=0.1, seed=3) == []


class Silent(Alone):
    """A rank that may send without receiving, or receive without sending."""

    def exchange(self, *, receive: Any = (), **how: Any) -> Any:
        return _Done(tuple(receive))


def layer(ring: Ring) -> None:
    context = Context(ring, zigzag(S, P), block="blockwise", validate=False)
    made = ContextParallelAttention(64, heads=4)(torch.empty(1, S // P, 64), context)
    made.sum().backward()


def layer_alone(ring: Ring) -> None:
    ContextParallelAttention(64, heads=4, sinks=True)(torch.empty(1, S, 64)).sum().backward()


def convolution(ring: Ring) -> None:
    x, weight = torch.empty(1, S // P, 8, requires_grad=True), torch.empty(8, 4, requires_grad=True)
    short_convolution(x, weight, ring=ring, layout=zigzag(S, P), validate=False).sum().backward()


def caches(ring: Ring) -> None:
    k, v = torch.empty(1, 2, 9, 16), torch.empty(1, 2, 9, 16)
    for _ in range(2):
        ShardedCache(ring, batch=1, kv_heads=2, head_dim=16).append(k, v)
    pages = PagedCache(ring, kv_heads=2, head_dim=16, pages=8)
    sequence = pages.add()
    pages.append(k, v, [sequence], [9])
    pages.shard(sequence)


def tables_of_flex(ring: Ring) -> None:
    flex.block_tables.__wrapped__((Tile(0, 9, 0, 9, True),), 9, 9, torch.device("cpu"))


PROGRAMS: dict[str, Callable[[Ring], Any]] = {
    "a layer": layer,
    "a layer on one GPU": layer_alone,
    "a short convolution": convolution,
    "caches": caches,
    "tables of flex": tables_of_flex,
    "gather": lambda ring: zigzag(S, P).gather(ring, torch.empty(1, S // P, 8)),
    "labels": lambda ring: next_tokens(torch.empty(1, S, dtype=torch.int64), MASKS["documents"]),
}


def waited_for_in(program: str) -> list[str]:
    with fake_gpu("blockwise") as waits:
        PROGRAMS[program](Ring(Silent(1, P)))
    return waits.found


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_other_part_of_a_model_waits(program: str) -> None:
    assert waited_for_in(program) == []


WAITING = [  # the code of today, the code that waited, and the call that shows it
    (flash, "_bounds", "upload(np.array([0, *accumulate(lengths)], np.int32), device)",
     "torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)",
     lambda: waited_for("flash", "ring", MASKS["documents"])),
    (TileRules, "dropout_factors", "upload(self.keys, like.device)", "self.keys.to(like.device)",
     lambda: waited_for("blockwise", "ring", MASKS["causal"], dropout=0.1, seed=3)),
    (flex, "block_tables", "upload(table, device)", "torch.from_numpy(table).to(device)",
     lambda: waited_for_in("tables of flex")),
    pytest.param(
        visits, "_tables", "upload(table.astype(np.int32), device)",
        "torch.from_numpy(table.astype(np.int32)).to(device)",
        lambda: waited_for("triton", "ring", MASKS["causal"]), marks=pytest.mark.needs_interpreter),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "old", "new", "found"), WAITING)
def test_a_copy_that_waits_is_found(
    owner: Any, name: str, old: str, new: str, found: Callable[[], list[str]]
) -> None:
    with rewritten(owner, name, old, new):
        assert set(found()) == {"to"}


def test_values_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: called.append("pin_memory") or x)
    monkeypatch.setattr(Tensor, "to", lambda x, *args, **how: called.append((*args, how)) or x)
    for device in map(torch.device, ("cuda", "cpu")):
        upload(np.arange(3), device)
    assert called == [
        "pin_memory",
        (torch.device("cuda"), {"non_blocking": True}),
        (torch.device("cpu"), {}),
    ]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("float(q.sum()); ", "item"),
        ("torch.nonzero(q); ", "nonzero"),
        ("q.cpu(); ", "cpu"),
        ("torch.cuda.synchronize(); ", "synchronize"),
        ("torch.tensor([0], device=q.device); ", "tensor"),
        ("torch.from_numpy(np.arange(3)).to(q.device); ", "to"),
        ("q[:, :, torch.tensor([0])]; ", "a copy"),
    ],
)
def test_a_wait_is_found(code: str, found: str) -> None:
    forward = blockwise.Blockwise.forward

    def waiting(self: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(DynamicOutputShapeException, DataDependentOutputException):
            exec(code, {"torch": torch, "np": np, "q": q, "__name__": "ringlab"})
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
