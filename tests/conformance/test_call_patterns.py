"""The checks of ways to call a ring, and of forms of its inputs, pass right rings and find wrong ones."""

from __future__ import annotations

from collections import Counter, deque
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import plain_ring, ring_attention
from ringlab.conformance import checks
from ringlab.conformance.checks.arguments import ARGUMENT_CHECKS
from ringlab.conformance.checks.call_patterns import CALL_CHECKS
from ringlab.conformance.checks.check import Plan
from ringlab.conformance.checks.measuring import expected, measure
from ringlab.conformance.checks.placed_shards import SHARD_CHECKS
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.run.call_patterns import _FEW, CALL_PATTERNS
from ringlab.conformance.run.run import MANY_MORE_LENGTHS, Run
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.suite import check
from ringlab.conformance.target.calling import AXES, as_axes, from_axes
from ringlab.conformance.target.claims import Target, as_target
from ringlab.errors import BackendError
from tests.conformance.reports import failed, quick

pytestmark = pytest.mark.thorough


def through_lse() -> Any:
    """Return a plain ring that differentiates lse correctly: a mutant whose one wrong sign is repaired."""
    source = MUTANTS["gradient_of_lse_added"].source()
    right = source.replace(".sum(-1) + dlse", ".sum(-1) - dlse")
    assert right != source
    space: dict[str, Any] = {"__name__": "ringlab_mutant_gradient_of_lse_added"}
    MUTANTS["gradient_of_lse_added"].module()  # imports the module, in which a dataclass looks up its types
    exec(compile(right, "<right>", "exec"), space)
    return space["attend"]


def test_a_right_gradient_of_lse_passes_in_every_claimed_dtype() -> None:
    for dtype in ("float32", "bfloat16", "float64"):
        report = quick(through_lse(), only=("gradient of lse",), dtypes=(dtype,))
        assert report.findings[-1].applies and failed(report) == {}


def test_an_lse_that_autograd_knows_has_no_gradient_is_no_failure() -> None:
    (_, finding) = quick(plain_ring.attend, only=("gradient of lse",)).findings
    assert finding.ok and not finding.applies and "autograd says so" in finding.evidence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_bounds_know_a_gradient_of_lse(dtype: str) -> None:
    """The true gradients are autograd's in float64, and the plainest implementation is within the bounds."""
    run = Run(1, 12, "contiguous", True, H=2, K=1, D=8, dtype=dtype, dlse=True, seed=3)
    with_dlse, without = expected(run.plain)[0], expected(Run(**{**run.__dict__, "dlse": False}).plain)[0]
    assert np.array_equal(with_dlse.dv, without.dv) and not np.allclose(with_dlse.dq, without.dq)
    ran = on_virtual_ranks(as_target(through_lse()), Run(**{**run.__dict__, "use": "loss on lse"}))
    assert [each.ok for each in measure(ran)] == [True] * 3


def test_ringlabs_own_ring_honours_or_refuses_every_argument_that_it_takes() -> None:
    names = [each.name for each in (*CALL_CHECKS, *ARGUMENT_CHECKS, *SHARD_CHECKS)]
    report = quick(ring_attention, only=names, layouts=("contiguous", "zigzag"))
    assert failed(report) == {}
    left = {each.name for each in report.findings if not each.applies}
    assert left == {
        *("padded documents", "padding", "joint tokens", "alibi", "uneven heads"),
        *("far positions", "any shards"),  # it takes a layout
    }


def test_every_way_of_calling_is_asked_by_the_check_that_is_named_for_it() -> None:
    claims = as_target(plain_ring.attend).claims()
    plan = Plan(claims, quick=True, seed=0)
    planned = [(run.use, each.name) for each in CALL_CHECKS for run in each.runs(plan) if run.use]
    of_others = {use: check for use, check in planned if check != "side effects"}
    assert dict.fromkeys(dict(planned), "side effects") | of_others == {
        name: use.check for name, use in CALL_PATTERNS.items() if name != MANY_MORE_LENGTHS
    }
    assert {each.name for each in CALL_CHECKS} <= set(checks.names())


def test_gradients_from_a_function_of_their_own_are_not_asked_what_only_autograd_does() -> None:
    def forward(q, k, v, *, ring, positions, causal):
        with torch.no_grad():
            return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    def backward(q, k, v, *, ring, positions, causal, dout, out, lse):
        call = plain_ring.Call(ring, positions, causal, q.shape[-1] ** -0.5)
        dq, dk, dv = plain_ring.backward(call, q, k, v, out, lse, dout)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    names = [each.name for each in CALL_CHECKS if each.tier == "quick"]
    report = quick(Target(forward, gradients=backward), only=names, layouts=("zigzag",))
    assert failed(report) == {}
    left = {each.name for each in report.findings if not each.applies}
    assert left == {
        "gradient of lse",
        "frozen inputs",
        "changed in place",
        "recomputation",
        "second derivatives",
        "other threads",
    }


@pytest.mark.parametrize("axes", AXES)
def test_axes_there_and_back(axes: str) -> None:
    x = torch.arange(1 * 2 * 3 * 4.0).reshape(1, 2, 3, 4)
    assert torch.equal(from_axes(as_axes(x, axes), axes), x)
    assert as_axes(x, axes).shape == {"LHD": (3, 2, 4)}.get(
        axes, tuple({"B": 1, "H": 2, "L": 3, "D": 4}[a] for a in axes)
    )


@pytest.mark.parametrize("axes", ["BLHD", "LBHD", "LHD"])
def test_a_target_with_its_axes_in_another_order_passes(axes: str) -> None:
    def attend(q, k, v, *, ring, positions, causal, scale=None):
        q, k, v = (from_axes(x, axes) for x in (q, k, v))
        out, lse = plain_ring.attend(ring, q, k, v, causal=causal, positions=positions, scale=scale)
        return as_axes(out, axes), lse[0] if axes == "LHD" else lse

    names = ("types", "forward", "lse", "dk", "masks", "ragged", "calls in flight", "strided", "scale")
    assert failed(quick(attend, only=names, axes=axes)) == {}


@pytest.mark.parametrize("form", ["qkv", "kv"])
def test_packed_inputs_are_stacked_and_their_gradients_found(form: str) -> None:
    def qkv_packed(qkv, *, ring, positions, causal):
        return _of(ring, positions, causal, *qkv.unbind(-3))

    def kv_packed(q, kv, *, ring, positions, causal):
        return _of(ring, positions, causal, q, *kv.unbind(-3))

    def _of(ring: Any, positions: Any, causal: bool, *tensors: Tensor) -> Tensor:
        q, k, v = (from_axes(x, "BLHD") for x in tensors)
        return as_axes(plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)[0], "BLHD")

    target = {"qkv": qkv_packed, "kv": kv_packed}[form]
    report = quick(target, only=("forward", "dq", "dk", "dv", "masks", "grouped heads"), axes="BLHD")
    assert failed(report) == {}
    assert report.findings[-1].applies == (form == "kv")  # stacked q and k have the same heads


def test_an_allowed_failure_passes_with_its_reason_and_others_do_not() -> None:
    target = as_target(MUTANTS["gathers_under_a_mask"].target(), allow={"gather": "the mask needs every key"})
    report = quick(target, only=("gather", "forward"))
    (finding,) = [each for each in report.findings if each.name == "gather"]
    assert report.ok and finding.evidence.startswith(
        "allowed, the mask needs every key: forward: rank 0 makes"
    )
    other = as_target(MUTANTS["averages_blocks"].target(), allow={"gather": "the mask needs every key"})
    assert quick(other, only=("gather", "forward")).failed == ["forward"]


def test_a_wrong_run_settles_a_check_and_the_runs_that_it_alone_needs_are_skipped() -> None:
    whole = quick(plain_ring.attend, only=("masks",)).runs
    wrong = quick(MUTANTS["no_mask"].target(), only=("masks",))
    assert wrong.failed == ["masks"] and wrong.runs < whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("ringlab.conformance.plain_distributed:attend", []),
        ("tests.conformance.bad_targets:takes_ranks_of_the_group_for_ranks_of_the_world", ["two rings"]),
    ],
)
def test_a_group_that_is_not_the_world_is_given_over_torch_distributed(target: str, found: list[str]) -> None:
    report = check(target, quick=True, only=("forward", "two rings"), ranks=(2, 4), limit=20.0)
    assert report.failed == found and all(each.applies for each in report.findings)


def test_a_target_that_takes_no_group_is_not_asked_for_two_rings() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    plan = Plan(as_target(attend).claims(), quick=True, seed=0)
    (two,) = [each for each in CALL_CHECKS if each.name == "two rings"]
    assert two.needs(plan) == "the target takes no process group"


def test_a_ring_without_gradients_is_asked_how_it_is_called_too() -> None:
    kept: list[Tensor] = []

    def leaks(q, k, v, *, ring, positions, causal):
        kept.append(torch.zeros(100))
        torch.set_default_dtype(torch.float64)
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    names = ("inference", "many calls", "side effects", "same memory", "two rings")
    report = quick(leaks, only=names, backward=False)
    assert {*report.failed} == {"many calls", "side effects"} and torch.get_default_dtype() == torch.float32
    assert all(finding.applies for finding in report.findings)


@pytest.mark.parametrize(("ranks", "length"), [((5,), 30), ((8,), 32), ((16,), 32)])
def test_lengths_divide_by_twice_the_ranks_unless_others_are_claimed(
    ranks: tuple[int, ...], length: int
) -> None:
    plan = Plan(as_target(plain_ring.attend, ranks=ranks, ragged=False).claims(), quick=True, seed=0)
    assert plan.run(ranks[0], 24).S == length
    every = [
        run for each in checks.CHECKS if not each.needs(plan) for run in each.runs(plan) if not run.fault
    ]
    assert all(run.S % (2 * run.P) == 0 and sum(run.documents) in (0, run.S) for run in every)


def test_lengths_that_may_show_growth_are_those_of_no_other_run() -> None:
    """What a run keeps for a length grows only once, so lengths of other runs would hide a leak."""
    plan = Plan(as_target(plain_ring.attend).claims(), quick=True, seed=0)
    every = [run for each in checks.CHECKS if not each.needs(plan) for run in each.runs(plan)]
    growing = {
        run.S // run.P - 2 * shorter for run in every if run.use == "many lengths" for shorter in range(_FEW)
    }
    others = {
        length
        for run in every
        if run.use != "many lengths"
        for length in (run.S // run.P, -(-run.S // run.P))
    }
    assert len(growing) == _FEW and growing.isdisjoint(others)


def test_float16_alone_has_a_scale_of_gradients_that_it_can_hold() -> None:
    assert failed(quick(plain_ring.attend, only=("loss scale",), dtypes=("float16",))) == {}


def test_an_unknown_check_cannot_be_allowed_and_a_crash_is_not() -> None:
    with pytest.raises(BackendError, match="allow= of checks among"):
        quick(as_target(plain_ring.attend, allow={"no such": "reason"}), only=("forward",))

    def crashes(q, k, v, *, ring):
        raise RuntimeError("down")

    assert quick(as_target(crashes, allow={"forward": "reason"}), only=("forward",)).failed == ["forward"]


def test_an_out_that_is_a_view_may_be_refused_by_autograd() -> None:
    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Tensor:
            with torch.enable_grad():
                ctx.leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                ctx.out, _ = plain_ring.attend(call[0], *ctx.leaves, causal=call[1], positions=call[2])
            return ctx.out.detach().clone()[:]

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            return *torch.autograd.grad(ctx.out, ctx.leaves, dout), None, None, None

    def attend(q, k, v, *, ring, positions, causal):
        return Attend.apply(q, k, v, ring, causal, positions)

    (_, finding) = quick(attend, only=("changed in place",), layouts=("zigzag",)).findings
    assert finding.ok and "autograd refuses" in finding.evidence


class _Marked(torch.autograd.Function):
    """The identity, whose gradient is lost if the mark has changed since its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: list[int]) -> Tensor:
        ctx.mark, ctx.then = mark, mark[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (ctx.mark[0] == ctx.then), None


def test_a_ring_that_refuses_nan_is_said_to_refuse_it() -> None:
    def attend(q, k, v, *, ring, positions, causal):
        if k.isnan().any():
            raise ValueError("NaN in k")
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    (_, finding) = quick(attend, only=("NaN",)).findings
    assert finding.ok and "shows in each row" not in finding.evidence
    assert "an infinite gradient shows" in finding.evidence and "NaN in k" in finding.evidence


@pytest.mark.parametrize("error", [ValueError("not here"), torch._dynamo.exc.Unsupported("an operator")])
def test_an_error_under_the_compiler_is_a_refusal(error: Exception) -> None:
    def attend(q, k, v, *, ring, positions, causal):
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # otherwise the whole function runs without the compiler
            raise error
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    (_, finding) = quick(attend, only=("compilation",), layouts=("zigzag",)).findings
    assert finding.ok and not finding.applies and "under torch.compile" in finding.evidence


def test_second_derivatives_may_be_right() -> None:
    def right(q, k, v, *, ring, causal):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & causal
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    target = Target(right, layouts=("contiguous",), schedule="any", ragged=False, ranks=(1,))
    (_, finding) = quick(target, only=("second derivatives",)).findings
    assert finding.ok and "refused" not in finding.evidence


def test_a_ring_that_an_error_leaves_half_changed_is_found() -> None:
    """Two rings are found: after an error one loses what it kept for backward, the other counts a call that failed."""
    mark, begun = [0], [0]

    def forgets(q, k, v, *, ring, positions, causal):
        try:
            return plain_ring.attend(ring, _Marked.apply(q, mark), k, v, causal=causal, positions=positions)
        except Exception:
            mark[0] += 1
            raise

    def counts(q, k, v, *, ring, positions, causal):
        if ring.world_size == 1:  # a wrong shape there, and no value on several ranks
            begun[0] += 1
            assert k.shape == v.shape
            q, begun[0] = q * begun[0], 0
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    assert quick(forgets, only=("calls in flight", "side effects")).failed == ["calls in flight"]
    assert quick(counts, only=("calls in flight", "side effects")).failed == ["side effects"]
    assert quick(plain_ring.attend, only=("calls in flight", "side effects")).failed == []


@pytest.mark.parametrize(("room", "ok", "runs"), [(8, True, 2), (64, True, 3), (None, False, 3)])
def test_a_cache_by_length_with_a_limit_passes(room: int | None, ok: bool, runs: int) -> None:
    """A cache of up to 64 lengths passes; one without a limit is found, since many more lengths are tried."""

    @lru_cache(maxsize=room)
    def angles(length: int) -> Tensor:
        return torch.arange(length).cos()

    def attend(q, k, v, *, ring, causal, positions):
        angles(q.shape[2])
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    report = quick(attend, only=("many calls",))
    assert (report.ok, report.runs) == (ok, runs)
    if not ok:
        assert "never freed" in failed(report)["many calls"] and "160 lengths" in failed(report)["many calls"]


@pytest.mark.parametrize(("room", "every", "grows"), [(32, 1, False), (128, 1, False), (None, 6, True)])
def test_a_pool_of_buffers_with_a_limit_passes(room: int | None, every: int, grows: bool) -> None:
    """A pool that is full after up to 128 calls passes; a buffer that each sixth call leaves behind is found."""
    pools: dict[int, deque[Tensor]] = {}
    calls: Counter[int] = Counter()

    def attend(q, k, v, *, ring, causal, positions):
        calls[ring.rank] += 1
        if calls[ring.rank] % every == 0:
            pools.setdefault(ring.rank, deque(maxlen=room)).append(torch.empty(1000))
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    ran = on_virtual_ranks(as_target(attend), Run(2, 24, "zigzag", True, use="many calls"))
    assert calls[0] > 200
    assert any("after 204 calls still" in text for text in ran.noted("use")) == grows


def test_a_buffer_for_the_longest_call_so_far_passes() -> None:
    held: list[Tensor] = [torch.zeros(0)]

    def attend(q, k, v, *, ring, causal, positions):
        if len(held[0]) < q.shape[2]:
            held[0] = torch.zeros(q.shape[2])
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    report = quick(attend, only=("many calls",))
    assert report.ok and report.runs == 2


def test_calls_in_flight_differ_in_all_that_a_target_claims() -> None:
    seen: list[tuple[Any, ...]] = []

    def attend(q, k, v, *, ring, causal, layout, scale=None):
        seen.append((q.shape[2], q.dtype, causal, layout.name, scale))
        return ring_attention(q, k, v, ring=ring, causal=causal, layout=layout, scale=scale, return_lse=True)

    run = Run(1, 8, "zigzag", True, use="layers that differ")
    on_virtual_ranks(as_target(attend, layouts=("contiguous", "zigzag"), dtypes=("float32", "float64")), run)
    first, second = seen
    assert not any(one == other for one, other in zip(first, second, strict=True))
    seen.clear()
    only_one = as_target(attend, layouts=("zigzag",), dtypes=("float32",), causal=(True,))
    on_virtual_ranks(only_one, run)
    first, second = seen
    assert first[1:4] == second[1:4] and first[0] != second[0] and first[4] != second[4]
