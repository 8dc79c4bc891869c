"""The suite calls a function by its own parameters, reads its claims from them, and joins its shards."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ringlab import Mask, edits, oracle, plain_ring, ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.conformance import Target, check, checks
from ringlab.conformance.checks.arguments import ARGUMENT_CHECKS
from ringlab.conformance.checks.check import Plan, Verdict
from ringlab.conformance.checks.dropout import DROPOUT_CHECKS
from ringlab.conformance.checks.placed_shards import SHARD_CHECKS
from ringlab.conformance.kinds.decode import check_decode
from ringlab.conformance.kinds.merge import check_merge
from ringlab.conformance.mutants import SOURCE
from ringlab.conformance.run.loading import load, resolve
from ringlab.conformance.run.meters import PassMeter
from ringlab.conformance.run.run import Meter, Ran, Run, Trouble, inputs, join
from ringlab.conformance.target.calling import call, written
from ringlab.conformance.target.claims import as_target
from ringlab.errors import BackendError, LayoutError
from ringlab.layout import layout_names
from ringlab.plain_ring import Call, backward, forward

pytestmark = pytest.mark.thorough

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
    """Run ringlab's ring on tensors of shape (B, L, H, D)."""
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
            "autocast",
            "frozen inputs",
        ),
        *("changed in place", "recomputation", "second derivatives", "default dtype", "other threads"),
        *(
            {each.name for each in (*ARGUMENT_CHECKS, *SHARD_CHECKS, *DROPOUT_CHECKS)}
            - {"value dims", "cross-attention"}
        ),
    }


def test_shards_are_joined_by_position() -> None:
    from ringlab.conformance.run.virtual import on_virtual_ranks

    run = Run(3, 17, "token-fold", True, H=4, K=2)
    target = as_target(ring_attention, layouts=("token-fold",))
    ran = on_virtual_ranks(target, run)
    q, k, v, _ = inputs(run)
    assert ran.trouble is None and ran.arrays.keys() == {"out", "lse", "dq", "dk", "dv"}
    np.testing.assert_allclose(ran.arrays["out"], oracle.attention(q, k, v, causal=True).out, atol=1e-5)


def test_a_rank_that_failed_leaves_no_result() -> None:
    from ringlab.conformance.run.run import RankResult, Trouble

    trouble = Trouble("raised", "E")
    ran = join(Run(2, 4, "contiguous", False), [RankResult(), RankResult(trouble=trouble)])
    assert (ran.trouble, ran.returned, ran.arrays) == (trouble, (0,), {})


@pytest.mark.parametrize(("apart", "failed"), [(True, []), (False, ["aliasing"])])
def test_parts_of_one_buffer_are_no_aliases_and_one_memory_for_two_is(apart: bool, failed: list[str]) -> None:
    """dK and dV may be two halves of one tensor, as in some rings, but must not share memory."""

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
        ({"dtypes": ("float31",)}, "one of the dtypes"),
        ({"layouts": ("no-such-layout",)}, "one of the layouts"),
        ({"layouts": {"mine": "no-such-layout"}}, "one of the layouts"),
    ],
)
def test_a_claim_that_is_none_is_a_bad_request_and_no_fault_of_the_target(claim, told) -> None:
    with pytest.raises(BackendError, match=told):
        as_target(plain_ring.attend, **claim).claims()


class Layer(nn.Module):
    """A ring as a module that is a layer of a model."""

    def forward(self, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)


class Ringer:
    """A ring as a callable object, and as the object's method."""

    def __call__(self, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    def attend(self, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
        return self(ring, q, k, v, causal=causal, positions=positions)


@functools.wraps(plain_ring.attend)
def handed_on(*args: Any, **kwargs: Any) -> Any:
    return plain_ring.attend(*args, **kwargs)


PARAMETERS = ("ring", "q", "k", "v", "causal", "positions")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Layer(), "Layer"),
        (nn.DataParallel(Layer()), "DataParallel"),
        (Ringer(), "Ringer"),
        (Ringer().attend, "Ringer.attend"),
        (functools.partial(plain_ring.attend, scale=None), "attend"),
        (functools.partial(Layer()), "Layer"),
    ],
    ids=["module", "wrapped module", "object", "method", "partial", "partial of a module"],
)
def test_a_callable_of_any_shape_is_called_by_its_own_parameters(function: Any, name: str) -> None:
    assert written(function) == PARAMETERS and as_target(function).name == name
    if isinstance(function, nn.DataParallel):  # DataParallel copies its inputs to devices of its own
        return
    for each in (function, Target(function, dtypes=("float32",))):
        report = check(each, quick=True, isolate=False, only=("dq", "masks"), ranks=(2,))
        assert report.failed == [] and all(finding.applies for finding in report.findings)


def test_wrapped_and_compiled_functions_have_the_parameters_of_what_they_wrap() -> None:
    @torch.jit.script
    def scripted(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        return q

    assert written(handed_on) == (*PARAMETERS, "scale") and written(scripted) == ("q", "k", "v", "causal")
    assert written(torch.compile(Layer())) == written(torch.compile(Layer().forward)) == PARAMETERS
    assert check(handed_on, quick=True, isolate=False, only=("forward",), ranks=(2,)).failed == []


def test_what_a_partial_binds_is_fixed_as_options_are() -> None:
    causal_only = functools.partial(plain_ring.attend, causal=True)
    for target in (as_target(causal_only), as_target(plain_ring.attend, options={"causal": True})):
        assert target.claims().causal == (True,)
        assert check(target, quick=True, isolate=False, only=("forward", "masks"), ranks=(2,)).failed == []


def unknown(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, rotary: Tensor) -> Tensor:
    return q


def hidden(*args: Any, **kwargs: Any) -> Any:
    return plain_ring.attend(*args, **kwargs)


@pytest.mark.parametrize(
    ("target", "got", "remedy"),
    [
        (unknown, "none for rotary", "Target(unknown, options={'rotary': …}), functools.partial(unknown, rotary=…)"),
        (hidden, "hidden(*args, **kwargs)", "functools.wraps"),
        (Layer, "the class Layer", "give an instance of it"),
        (plain_ring._Attention, "the class _Attention", "give _Attention.apply"),
        (5, "int", ""),
    ],
    ids=["unknown parameter", "hidden parameters", "class", "autograd function", "number"],
)  # fmt: skip
def test_a_call_that_cannot_be_made_is_refused_before_any_run(target: Any, got: str, remedy: str) -> None:
    with pytest.raises(BackendError) as caught:
        check(target, quick=True, isolate=False)
    assert got in caught.value.got and remedy in caught.value.remedy


def test_a_call_that_python_refuses_ends_the_check_with_one_error() -> None:
    """A call that Python refuses is reported once. Here functools.wraps promises a parameter that is missing."""

    def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return q

    @functools.wraps(plain_ring.attend)
    def promised(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **kwargs)

    report = check(promised, quick=True, isolate=False)
    first, *others = report.findings
    assert (report.runs, first.ok) == (1, False)
    assert "unexpected keyword argument 'positions'" in first.evidence and "remedy: " in first.evidence
    assert {each.evidence for each in others if each.applies} == {"not run: the target cannot be called"}
    assert str(report).startswith("The target cannot be checked")
    with pytest.raises(BackendError, match="missing 3 required"):
        check_decode(functools.wraps(lambda q, k, v, ring: q)(lambda *a, **kw: Ringer().attend(*a[:1], k=1)))


def test_an_error_within_the_target_is_no_refused_call() -> None:
    def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return plain_ring.attend(ring, q, k, v, causal=causal)  # type: ignore[call-arg, return-value]

    report = check(attend, quick=True, isolate=False, only=("forward",), ranks=(2,))
    assert report.failed == ["forward"] and "positions" in report.findings[1].evidence


def test_a_merge_that_requires_more_is_refused() -> None:
    with pytest.raises(BackendError, match="one that requires sink"):
        check_merge(lambda outs, lses, sink: outs[0])


def test_interleaved_gradients_of_one_buffer_are_no_aliases() -> None:
    """Gradients of a tensor that joined K and V are not aliases, because they share no element."""

    def joined(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    def gradients(
        ring: Ring, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool, positions: Any
    ) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, torch.cat([k, v], -1))]
        k, v = leaves[1].chunk(2, -1)
        out, _ = plain_ring.attend(ring, leaves[0], k, v, causal=causal, positions=positions)
        dq, dkv = torch.autograd.grad(out, leaves, dout)
        return dq, *dkv.chunk(2, -1)

    target = Target(joined, gradients=gradients)
    assert check(target, quick=True, isolate=False, only=("aliasing", "dk", "dv")).failed == []


def test_a_ring_that_learns_its_lengths_from_its_ranks_passes() -> None:
    """A ring that gathers the ranks' lengths passes, since so few numbers do not count as a message."""

    def learns(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Any:
        ends = torch.cat(ring.all_gather(torch.tensor([q.shape[2]]))).cumsum(0).tolist()
        positions = [torch.arange(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    names = ("forward", "ragged", "wrong shape", "rounds", "bytes")
    report = check(learns, quick=True, isolate=False, only=names)
    assert {each.name: each.evidence for each in report.findings if not each.ok} == {}
    assert "results are those of the shorter sequence" in report.findings[-1].evidence


@pytest.mark.parametrize(("numbers", "before"), [(12, True), (12, False), (400, True)])
def test_ranks_may_agree_on_shapes_before_data_by_short_messages(numbers: int, before: bool) -> None:
    """Shapes and a digest, about 100 bytes a rank, are no data; a longer message is, and so is one after the blocks."""

    def agrees(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
        found = None if before else plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)
        said = ring.all_gather(torch.full((numbers,), q.shape[2]))
        if any(not torch.equal(each, said[0]) for each in said):
            raise ValueError("all shards need one length")
        return found or plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    report = check(agrees, quick=True, isolate=False, only=("rounds", "bytes"))
    assert report.ok == (numbers == 12 and before) and ("bytes" in report.failed) != report.ok


def test_a_pass_has_few_headers() -> None:
    meter, flag = PassMeter(0, 4, lambda: None, False, block=16_384), torch.zeros(1)
    for _ in range(9):
        meter.message([flag], 1)
    assert (meter.exchanges, meter.sent) == (1, 4)
    without = PassMeter(0, 4, lambda: None, False)
    without.message([flag], 1)
    assert without.exchanges == 1


SUMMED_BY_RANK = """
+KEPT: dict[Any, Tensor] = {}
+
+
 class _Attention(torch.autograd.Function):
@@
-        out = out.to(q.dtype)
+        out = out.to(q.dtype).clone()
@@
-    out = torch.zeros(q.shape, dtype=state_dtype(q.dtype), device=q.device)
+    out = torch.zeros(q.shape, dtype=state_dtype(q.dtype), device=q.device)
+    out = KEPT.setdefault((ring.rank, q.shape, q.dtype), out).zero_()
""".strip()


def test_memory_that_is_kept_by_rank_may_serve_two_rings() -> None:
    """A ring may keep memory by rank number, although virtual ranks of two rings then share this memory."""
    module = edits.as_module(edits.apply(SUMMED_BY_RANK, SOURCE), "ringlab_test_summed_by_rank")
    assert check(module.attend, quick=True, isolate=False, only=("two rings", "forward")).failed == []


def test_padded_tiles_are_no_more_work_than_long_shards_need() -> None:
    def padded(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
        pad, L = -q.shape[2] % 128, q.shape[2]
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        S = sum(map(len, positions))
        far = [torch.cat([each, torch.arange(S, S + -len(each) % 128)]) for each in positions]
        if not causal and pad:  # without a causal mask, rows would see the keys of padding
            raise ValueError("tiles are padded under a causal mask only")
        out, lse = plain_ring.attend(ring, q, k, v, causal=causal, positions=far)
        return out[:, :, :L], lse[:, :, :L]

    target = Target(padded, causal=(True,), layouts=("contiguous",))
    report = check(target, quick=True, isolate=False, only=("forward", "work"))
    assert {each.name: each.evidence for each in report.findings if not each.ok} == {}
    short = as_target(target).claims()
    assert report.runs > len({run for each in ("forward", "work") for run in _runs_of(each, short)})


def _work_of(rows: int, keys: int, dims: int = 1, times: int = 1, causal: bool = False) -> Verdict:
    """Return the verdict of `work` on a ring that computes padded tiles of this size, each `times` times."""

    def made(run: Run) -> Ran:
        tokens, work = run.S // run.P, times * run.P**2
        for length, tile in ((tokens, rows), (tokens, keys), (run.D, dims)):
            work *= -(-length // tile) * tile
        flops = [count * 2 * run.H * work // run.P for count in (2, 5)]
        forward, backward = ([Meter(flops=each)] * run.P for each in flops)
        return Ran(run, forward=forward, backward=backward)

    claims = as_target(plain_ring.attend).claims()
    plan = Plan(replace(claims, causal=(causal,)), quick=True, seed=0)
    (work,) = checks.chosen(("work",))
    rans = [made(run) for run in work.runs(plan)]
    for _ in range(work.rounds):
        rans += [made(run) for run in work.judge(plan, rans).more]
    return work.judge(plan, rans)


COMMON = (16, 17, 32, 48, 64, 96, 128, 192, 256)


@pytest.mark.parametrize("rows", COMMON)
def test_no_common_tile_and_no_head_dim_pads_into_too_much_work(rows: int) -> None:
    for keys in (*COMMON, 176):
        for dims in (1, 64, 128):
            right = _work_of(rows, keys, dims)
            assert right.ok, (rows, keys, right.evidence)
            twice = _work_of(rows, keys, dims, times=2)
            assert not twice.ok and "padding of tiles" in twice.evidence


def test_work_that_no_row_sees_and_a_ring_without_longer_results_are_told() -> None:
    everything = _work_of(1, 1, causal=True)
    assert not everything.ok and everything.more == () and "is no padding" in everything.evidence
    plan = Plan(as_target(plain_ring.attend).claims(), quick=True, seed=0)
    (work,) = checks.chosen(("work",))
    run = next(run for run in work.runs(plan) if not run.causal)
    short = Ran(run, forward=[Meter(flops=10**12)], backward=[Meter(flops=10**12)])
    longer = [Ran(each, trouble=Trouble("hung", "the limit")) for each in work.judge(plan, [short]).more]
    told = work.judge(plan, [short, *longer])
    assert not told.ok and told.more == () and "it may be padding of tiles" in told.evidence


def test_a_longer_run_that_fails_leaves_the_verdict_of_the_short_one() -> None:
    def twice(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
        if q.shape[2] > 64:
            raise ValueError("too long")
        plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    target = Target(twice, causal=(False,), layouts=("contiguous",))
    found = check(target, isolate=False, only=("work",)).findings[-1]
    assert not found.ok and "computes 2 of the S² pairs" in found.evidence
    assert "longer shards have no result: raised: ValueError: too long" in found.evidence


@pytest.mark.parametrize(("error", "ok"), [(ValueError, True), (IndexError, False)])
def test_an_error_with_a_window_in_long_shards_is_reported_by_work(error: type[Exception], ok: bool) -> None:
    def attend(q, k, v, *, ring, layout, causal, window=None):
        if window and q.shape[2] >= 64:
            raise error("no such window")
        mask = Mask(causal, window)
        return ring_attention(q, k, v, ring=ring, layout=layout, mask=mask, return_lse=True)

    target = Target(attend, causal=(True,), layouts=("contiguous",))
    found = check(target, quick=True, isolate=False, only=("work",)).findings[-1]
    assert found.ok == ok and "no such window" in found.evidence


def _runs_of(name: str, claims: Any) -> list[Run]:
    (found,) = checks.chosen((name,))
    return found.runs(Plan(claims, quick=True, seed=0))


@pytest.mark.parametrize(
    ("module", "name", "got", "remedy"),
    [
        ("ringlab.plain_rings", "attend", "no plain_rings in ringlab", "plain_ring"),
        ("ringlab.conformence.own", "attend", "no conformence in ringlab", "there is conformance"),
        ("rinlab.attention", "ring_attention", "no rinlab: neither in ", "there is ringlab"),
        ("qqqqqqqqqqqq", "ring", "no qqqqqqqqqqqq: neither in ", "begin in the folder that it lies in"),
        ("my_fodler.ring", "attend", "no my_fodler: neither in ", "there is my_folder"),
        ("ringlab.attention.ring_attention", "x", "ringlab.attention is one", "as in ringlab.attention:ring_attention"),
        ("ringlab.plain_ring", "atend", "nothing of that name", "there is attend"),
        ("my_folder/ring.py", "attend", "'my_folder/ring.py'", "as in my_folder.ring:function"),
        ("ring.py", "attend", "'ring.py'", "as in ring:function"),
        ("../ring", "attend", "'../ring'", "as in ring:function"),
        (".ring", "attend", "'.ring'", "as in package.module:function"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named_with_what_comes_near(
    module: str, name: str, got: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError) as caught:
        resolve(module, name)
    assert got in caught.value.got and remedy in caught.value.remedy


def test_what_is_there_is_found_in_a_class_too() -> None:
    assert resolve("ringlab.plain_ring", "attend") is plain_ring.attend
    assert resolve("pathlib", "Path.cwd")() == Path.cwd()


@pytest.mark.parametrize("imports", ["a_package_that_is_not_there", "wanting.sister"])
def test_a_package_that_the_target_needs_is_no_missing_target(
    imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanting").mkdir()
    (tmp_path / "wanting" / "__init__.py").write_text(f"import {imports}\n")
    (tmp_path / "wanting" / "ring.py").write_text("def attend(q, k, v):\n    return q\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=imports):
        resolve("wanting.ring", "attend")
