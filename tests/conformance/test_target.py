"""The adapter: how a function is called, what it claims, how shards are cut and joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import oracle, plain_ring, ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.conformance import Target, check
from ringlab.conformance.checks_arguments import ARGUMENT_CHECKS
from ringlab.conformance.checks_dropout import DROPOUT_CHECKS
from ringlab.conformance.loading import load
from ringlab.conformance.runs import Run, inputs, join
from ringlab.conformance.target import as_target, call
from ringlab.errors import BackendError, LayoutError
from ringlab.layout import layout_names
from ringlab.plain_ring import Call, backward, forward

QKV = tuple(torch.full((1,), float(n)) for n in range(3))


def test_arguments_are_given_by_name() -> None:
    def function(ring: str, value: Tensor, key: Tensor, query: Tensor, causal: bool, other: int = 5) -> Any:
        return ring, value, key, query, causal, other

    given = call(function, QKV, {"ring": "the ring", "causal": True, "layout": "unused"})  # type: ignore[arg-type]
    assert given == ("the ring", *QKV, True, 5)


def test_names_of_tensors_come_before_their_order() -> None:
    def function(v: Tensor, k: Tensor, q: Tensor, /, is_causal: bool = False) -> Any:
        return v, k, q, is_causal

    assert call(function, QKV, {"is_causal": True}) == (*QKV[::-1], True)  # type: ignore[arg-type]


def test_keywords_of_any_name_get_nothing() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return more

    assert call(function, QKV, {"causal": True}) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "over", "layouts", "causal"),
    [
        (lambda ring, q, k, v: q, "ring", ("contiguous",), (False,)),
        (lambda comm, q, k, v, layout: q, "ring", layout_names(), (False,)),
        (lambda q, k, v, causal: q, "torch.distributed", ("contiguous",), (False, True)),
        (lambda q, k, v, positions: q, "torch.distributed", layout_names(), (False,)),
    ],
)
def test_parameters_tell_the_claims(function: Any, over: str, layouts: Any, causal: Any) -> None:
    claims = as_target(function).claims()
    assert (claims.over, claims.layouts, claims.causal) == (over, layouts, causal)


def test_said_claims_replace_those_that_are_told() -> None:
    target = as_target(Target(lambda ring, q, k, v, layout: q, ranks=(2,)), layouts=("zigzag",), ragged=False)
    assert (target.layouts, target.ranks, target.ragged) == (("zigzag",), (2,), False)


def test_a_layout_of_its_own_must_own_each_token_once() -> None:
    target = Target(lambda q, k, v: q, layouts={"odd": lambda S, P: [range(1, S, 2), range(0, S, 2)]})
    assert [each.tolist() for each in target.positions("odd", 5, 2)] == [[1, 3], [0, 2, 4]]
    with pytest.raises(LayoutError):
        target.positions("odd", 5, 3)
    with pytest.raises(LayoutError):
        Target(lambda q, k, v: q, layouts={"all": lambda S, P: [range(S)] * P}).positions("all", 4, 2)


def test_a_layout_of_ringlab_may_have_another_name() -> None:
    target = Target(lambda q, k, v: q, layouts={"head-tail": "zigzag"})
    assert target.known_layout("head-tail", 16, 2) == zigzag(16, 2)


@pytest.mark.parametrize("reference", ["", "ringlab", "ringlab:", ":ring"])
def test_a_reference_names_a_module_and_something_in_it(reference: str) -> None:
    with pytest.raises(BackendError, match="package.module:function"):
        load(reference)


def swapped(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: Any) -> Tensor:
    """Takes and gives (B, L, H, D)."""
    assert q.shape[1] == layout.length(ring.rank)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ring_attention(q, k, v, ring=ring, layout=layout, causal=causal).transpose(1, 2)


def test_tokens_may_stand_before_heads() -> None:
    report = check(
        swapped, axes="BLHD", quick=True, isolate=False, only=("dq", "masks", "strided", "causality")
    )
    assert report.failed == []
    assert check(swapped, quick=True, isolate=False, only=("dq",)).failed == ["dq"]


def forward_alone(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
    out, lse = forward(Call(ring, positions, causal, q.shape[-1] ** -0.5), q.detach(), k.detach(), v.detach())
    return out.to(q.dtype), lse


def backward_alone(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    causal: bool,
    positions: Any,
) -> Any:
    gradients = backward(Call(ring, positions, causal, q.shape[-1] ** -0.5), q, k, v, out, lse, dout)
    return tuple(x.to(q.dtype) for x in gradients)


def test_a_backward_of_its_own_is_called() -> None:
    target = Target(forward_alone, gradients=backward_alone)
    assert (
        check(target, quick=True, isolate=False, only=("dq", "dk", "dv", "masks", "error growth")).failed
        == []
    )
    assert check(Target(forward_alone), quick=True, isolate=False, only=("dq",)).failed == ["dq"]


def test_what_is_not_claimed_is_not_asked() -> None:
    def full(ring: Ring, q: Tensor, k: Tensor, v: Tensor, layout: Any) -> Tensor:
        assert layout.S % (2 * layout.P) == 0 and layout.name == "striped" and ring.world_size in (2, 4)
        assert not q.requires_grad and k.shape == v.shape and q.shape[1] == k.shape[1]
        return ring_attention(q, k, v, ring=ring, layout=layout, causal=False)

    report = check(
        full, quick=True, isolate=False, layouts=("striped",), ranks=(2, 4), ragged=False, grouped=False,
        backward=False, dtypes=("float32",),
    )  # fmt: skip
    assert report.failed == []
    left_out = {finding.name for finding in report.findings if not finding.applies}
    assert left_out == {
        "lse",
        "dq",
        "dk",
        "dv",
        "masks",
        "blind rows",
        "grouped heads",
        "ragged",
        "scale",
        "causality",
        "peak memory",
        "two layers",
        *(
            "summed loss",
            "loss scale",
            "gradient of lse",
            "backward again",
            "calls in flight",
            "frozen inputs",
        ),
        *("changed in place", "recomputation"),
        *({each.name for each in (*ARGUMENT_CHECKS, *DROPOUT_CHECKS)} - {"value dims", "cross-attention"}),
    }


def test_shards_are_joined_by_position() -> None:
    from ringlab.conformance.perform import on_virtual_ranks

    run = Run(3, 17, "token-fold", True, H=4, K=2)
    target = as_target(ring_attention, layouts=("token-fold",))
    ran = on_virtual_ranks(target, run)
    q, k, v, _ = inputs(run)
    assert ran.trouble is None and ran.arrays.keys() == {"out", "lse", "dq", "dk", "dv"}
    np.testing.assert_allclose(ran.arrays["out"], oracle.attention(q, k, v, causal=True).out, atol=1e-5)


def test_a_rank_that_failed_leaves_no_result() -> None:
    from ringlab.conformance.runs import RankResult, Trouble

    trouble = Trouble("raised", "E")
    ran = join(Run(2, 4, "contiguous", False), [RankResult(), RankResult(trouble=trouble)])
    assert (ran.trouble, ran.returned, ran.arrays) == (trouble, (0,), {})


@pytest.mark.parametrize(("apart", "failed"), [(True, []), (False, ["aliasing"])])
def test_parts_of_one_buffer_are_no_aliases_and_one_memory_for_two_is(apart: bool, failed: list[str]) -> None:
    """dK and dV as two halves of a tensor, which some rings return, disturb each other in nothing."""

    def gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        both = torch.zeros(2, *k.shape)
        return torch.zeros_like(q), both[0], both[1] if apart else both[0]

    def zeros(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(q)

    target = Target(zeros, gradients=gradients, dtypes=("float32",))
    assert check(target, quick=True, isolate=False, only=("aliasing",)).failed == failed


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ({"dtypes": ("float31",)}, "a dtype among"),
        ({"layouts": ("spiral",)}, "a layout among"),
        ({"layouts": {"mine": "spiral"}}, "a layout among"),
    ],
)
def test_a_claim_that_is_none_is_a_bad_request_and_no_fault_of_the_target(claim, told) -> None:
    with pytest.raises(BackendError, match=told):
        as_target(plain_ring.attend, **claim).claims()
