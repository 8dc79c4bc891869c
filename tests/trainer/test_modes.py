"""Torch's modes around attention over a ring: each gives a plain call's results or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ringlab import VirtualCluster, attention, ring_attention, torch_modes, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, BackendError, GradientError, RinglabError
from ringlab.schedules import available as schedules

P, S = 2, 8
LAYOUT = zigzag(S, P)
BLOCKS = ("naive", "blockwise", "native")
Leaves = tuple[Tensor, ...]
Results = list[tuple[Tensor, ...]]


def leaves_of(ring: Ring, dtype: torch.dtype = torch.float64, seed: int = 0) -> Leaves:
    """Return this rank's q, k, v and dout."""
    generator = torch.Generator().manual_seed(seed)
    whole = (torch.randn(1, heads, S, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    q, k, v, dout = (LAYOUT.shard(x.to(dtype), ring.rank) for x in whole)
    return *(x.requires_grad_() for x in (q, k, v)), dout


def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return ring_attention(q, k, v, ring=ring, layout=LAYOUT, **{"block": "naive"} | options)


def run(program: Callable[..., Any], *args: Any) -> list[Any]:
    return VirtualCluster(P, memory=False).run(program, *args).results


def plain(ring: Ring, seed: int = 0, **options: Any) -> tuple[Tensor, ...]:
    *qkv, dout = leaves_of(ring, seed=seed)
    out = attend(ring, *qkv, **options)
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


def test_a_torch_that_cannot_leave_its_modes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils._python_dispatch, "_disable_current_modes")
    with pytest.raises(BackendError, match="_disable_current_modes") as caught:
        torch_modes.outside_modes()
    assert "torch>=2.11" in caught.value.remedy


def error_of(program: Callable[[], Any]) -> Any:
    try:
        return program()
    except RinglabError as error:
        return error


# Second derivatives.


def penalty_on(what: str, ring: Ring) -> Any:
    """Differentiate a loss that depends on a gradient of attention, as a gradient penalty does."""
    q, k, v, dout = leaves_of(ring)
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    out, lse = attend(ring, q, k, v, return_lse=True, sinks=sinks if "sinks" in what else None)
    loss = {"a sum": out.sum(), "lse": lse.pow(2).sum()}.get(what, (out * dout).pow(2).sum())
    of = {"the gradient of v": v, "the gradient of sinks": sinks}.get(what, q)
    if what == "dout":
        given = dout.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(out, q, given, create_graph=True)
    else:
        (gradient,) = torch.autograd.grad(loss, of, create_graph=True)
    return error_of(lambda: (loss + 10 * gradient.pow(2).sum()).backward())


PENALTIES = ("a sum", "lse", "dout", "the gradient of v", "the gradient of sinks")


@pytest.mark.parametrize("what", PENALTIES)
def test_second_derivatives_are_refused(what: str) -> None:
    assert [type(found) for found in run(lambda ring: penalty_on(what, ring))] == [GradientError] * P


def recorded(ring: Ring) -> tuple[Tensor, ...]:
    *qkv, dout = leaves_of(ring)
    out = attend(ring, *qkv)
    gradients = torch.autograd.grad(out, qkv, dout, create_graph=True)
    assert all(x.requires_grad for x in gradients)
    return out.detach(), *(x.detach() for x in gradients)


# Modes that give the results of a plain call.


def recomputed(ring: Ring, reentrant: bool) -> tuple[Tensor, ...]:
    *qkv, dout = leaves_of(ring)
    out = checkpoint(lambda *x: attend(ring, *x), *qkv, use_reentrant=reentrant)
    out.backward(dout)  # not torch.autograd.grad, which reentrant checkpoints do not support
    return out.detach(), *(x.grad for x in qkv)


SAME: dict[str, Callable[[Ring], tuple[Tensor, ...]]] = {
    "create_graph": recorded,
    "checkpoint": lambda ring: recomputed(ring, False),
    "reentrant checkpoint": lambda ring: recomputed(ring, True),
}


@lru_cache
def expected(seed: int = 0, block: str = "naive") -> tuple[tuple[Tensor, ...], ...]:
    return tuple(run(lambda ring: plain(ring, seed, block=block)))


def same(found: Results, true: Any) -> bool:
    return all(
        torch.equal(a, b) for one, two in zip(found, true, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("way", SAME)
def test_a_way_of_calling_changes_no_bit(way: str) -> None:
    assert same(run(SAME[way]), expected())


KEPT = {
    "native": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    "naive": torch.ops.aten.bmm.default,
}
"""What a selective checkpoint keeps of each block."""


@pytest.mark.parametrize("changed", [False, True], ids=["kept as they were", "changed or not"])
@pytest.mark.parametrize(
    ("block", "schedule"), [("native", "ring"), *(("naive", name) for name in schedules())]
)
def test_selective_checkpoints_change_no_bit(block: str, schedule: str, changed: bool) -> None:
    """Selective checkpoints change no bit, because no code writes into the kept result of the operator.

    The result is returned again when the forward is recomputed. Torch refuses a result that has changed or,
    with allow_cache_entry_mutation, uses the changed result.
    """
    kept: list[Any] = []

    def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keeps = operator == KEPT[block]
        kept.extend([operator] * keeps)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=changed)
    how = {"block": block, "schedule": schedule}

    def selective(ring: Ring) -> tuple[Tensor, ...]:
        *qkv, dout = leaves_of(ring)
        call = partial(attend, ring, **how)
        out = checkpoint(lambda *x: call(*x), *qkv, use_reentrant=False, context_fn=contexts)
        return out.detach(), *torch.autograd.grad(out, qkv, dout)

    assert same(run(selective), run(lambda ring: plain(ring, **how))) and kept


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("block", BLOCKS)
def test_without_a_graph(mode: Callable[[], Any], block: str) -> None:
    def program(ring: Ring) -> tuple[Tensor, ...]:
        with mode():
            q, k, v, _ = leaves_of(ring)
            return (attend(ring, q, k, v, block=block),)

    found = run(program)
    assert same(found, [one[:1] for one in expected(block=block)])
    assert not any(out.requires_grad for (out,) in found)


@pytest.mark.parametrize("frozen", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("block", BLOCKS)
def test_frozen_inputs(frozen: str, block: str) -> None:
    def program(ring: Ring) -> dict[str, Tensor]:
        named = dict(zip("qkv", leaves_of(ring)[:3], strict=True))
        out = attend(ring, *(x.detach() if name in frozen else x for name, x in named.items()), block=block)
        out.backward(leaves_of(ring)[3])
        return {name: x.grad for name, x in named.items() if x.grad is not None}

    for found, (_, *gradients) in zip(run(program), expected(block=block), strict=True):
        true = dict(zip("qkv", gradients, strict=True))
        assert found.keys() == true.keys() - set(frozen)
        assert all(torch.equal(x, true[name]) for name, x in found.items())


@pytest.mark.parametrize("validate", [True, False])
def test_micro_batches_in_flight(validate: bool) -> None:
    """Three forwards in flight can run backward in every order, if the order is the same on all ranks."""

    def program(ring: Ring) -> list[bool]:
        return [in_order(ring, order) for order in permutations(range(3))]

    def in_order(ring: Ring, order: tuple[int, ...]) -> bool:
        leaves = [leaves_of(ring, seed=seed) for seed in range(3)]
        outs = [attend(ring, *qkv, validate=validate) for *qkv, _ in leaves]
        found: dict[int, tuple[Tensor, ...]] = {}
        for seed in order:
            *qkv, dout = leaves[seed]
            found[seed] = outs[seed].detach(), *torch.autograd.grad(outs[seed], qkv, dout)
        return all(same([found[seed]], [true[seed][ring.rank]]) for seed in range(3))

    true = [expected(seed) for seed in range(3)]
    assert run(program) == [[True] * 6] * P


def test_ranks_that_go_back_in_another_order_are_told() -> None:
    def program(ring: Ring) -> Any:
        leaves = [leaves_of(ring, seed=seed) for seed in range(2)]
        outs = [attend(ring, *qkv) for *qkv, _ in leaves]
        first = ring.rank
        return error_of(lambda: outs[first].backward(leaves[first][3]))

    assert [type(found) for found in run(program)] == [AgreementError] * P


# Autocast.


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        yield


def mixed(ring: Ring, dtype: torch.dtype | None, block: str, inside: bool) -> tuple[Any, ...]:
    """Run q and k in float32 and v in bfloat16, as in a Llama under autocast, or with a cast by hand."""
    q, k, v, dout = leaves_of(ring, torch.float32)
    v = v.detach().bfloat16().requires_grad_()
    given = (q, k, v) if dtype else (q.bfloat16(), k.bfloat16(), v)
    with autocast(dtype):
        out = attend(ring, *given, block=block)
        gradients = torch.autograd.grad(out, (q, k, v), dout.bfloat16()) if inside else ()
    gradients = gradients or torch.autograd.grad(out, (q, k, v), dout.bfloat16())
    return out.detach(), *gradients


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("block", BLOCKS)
def test_autocast_casts_as_by_hand(block: str, inside: bool) -> None:
    by_hand = run(lambda ring: mixed(ring, None, block, False))
    found = run(lambda ring: mixed(ring, torch.bfloat16, block, inside))
    assert same(found, by_hand)
    dtypes = [
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]  # out, and the gradients of q, k, v
    assert all([x.dtype for x in one] == dtypes for one in found)


def test_the_dtype_is_that_of_torchs_own_attention() -> None:
    for given in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        x = torch.zeros(1, 1, 2, 4, dtype=given)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch_modes.as_autocast(x)[0].dtype == F.scaled_dot_product_attention(x, x, x).dtype


@contextmanager
def alone() -> Iterator[Ring]:
    """Yield a ring of this process, which computes on this thread, unlike virtual ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ring.of_group()
    dist.destroy_process_group()


def test_a_ring_that_computes_under_autocast_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that computes under autocast is noticed, because it rounds products of float32 states."""
    layout = zigzag(S, 1)

    def out(ring: Ring, dtype: torch.dtype | None) -> Tensor:
        q, k, v = (torch.randn(1, 2, S, 4, generator=torch.Generator().manual_seed(0)) for _ in range(3))
        with autocast(dtype):
            given = (x.bfloat16() for x in (q, k, v))
            return ring_attention(*given, ring=ring, layout=layout, block="naive")

    with alone() as ring:
        by_hand = out(ring, None)
        assert torch.equal(out(ring, torch.bfloat16), by_hand)
        monkeypatch.setattr(attention, "without_autocast", lambda kind: nullcontext())
        assert not torch.equal(out(ring, torch.bfloat16), by_hand)


def test_float64_is_left_alone() -> None:
    def program(ring: Ring) -> tuple[Tensor, ...]:
        with autocast(torch.bfloat16):
            return plain(ring)

    assert same(run(program), expected())


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_ranks_that_differ_in_autocast_are_told(given: torch.dtype) -> None:
    def program(ring: Ring) -> Any:
        q, k, v, _ = leaves_of(ring, given)
        with autocast(torch.bfloat16 if ring.rank else None):
            return error_of(lambda: attend(ring, q, k, v))

    for found in run(program):
        assert isinstance(found, AgreementError) and "autocast=torch.bfloat16" in str(found)


# torch.func and forward mode.


def transformed(name: str, ring: Ring) -> Any:
    q, k, v = (x.detach() for x in leaves_of(ring)[:3])

    def call(q: Tensor) -> Tensor:
        return attend(ring, q, k, v)

    if name == "forward_ad":
        return call(forward_ad.make_dual(q, q))
    if name == "vmap":
        return torch.func.vmap(call)(q[None])
    if name == "grad":
        return torch.func.grad(lambda q: call(q).sum())(q)
    return torch.func.jvp(call, (q,), (q,))


# torch counts forward-mode levels in the process, so two threads cannot both have a jvp.
TRANSFORMS = [(name, {1}) for name in ("grad", "vmap", "jvp", "forward_ad")]
TRANSFORMS += [(name, {0, 1}) for name in ("grad", "vmap", "forward_ad")]


@pytest.mark.parametrize("name, ranks", TRANSFORMS)
def test_transforms_are_refused_by_name(name: str, ranks: set[int]) -> None:
    def program(ring: Ring) -> Any:
        if ring.rank in ranks:
            return error_of(lambda: transformed(name, ring))
        return error_of(lambda: attend(ring, *leaves_of(ring)[:3]))

    with forward_ad.dual_level() if name == "forward_ad" else nullcontext():
        found = run(program)
    for rank, error in enumerate(found):
        assert name in str(error)
        assert isinstance(error, GradientError if rank in ranks else AgreementError)
