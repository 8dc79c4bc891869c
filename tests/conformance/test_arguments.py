"""A target may honour or refuse an argument but not get it wrong; a wrong ring passes after its repair."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import Mask, plain_ring, ring_attention
from ringlab.conformance.checks.arguments import ARGUMENT_CHECKS
from ringlab.conformance.checks.check import Plan
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.pairwise_cases import covering_pairs
from ringlab.conformance.report.text import summary
from ringlab.conformance.run.run import JOINT, NUMBERED, Run, inputs, joint_of, sinks_of, slopes_of
from ringlab.conformance.target.claims import Target, as_target
from ringlab.errors import BackendError
from ringlab.layout import per_document
from tests.conformance.reports import evidence, failed, quick

pytestmark = pytest.mark.thorough

WHOLE_PADDING = """whole = torch.zeros(len(self.padding), sum(map(len, self.positions)), dtype=torch.int64)
            whole[:, mine] = self.padding.long()
            whole = self.ring.all_reduce(whole).bool()[:, None, None]
            found = [(i, j, (none if mask is None else mask) | whole[..., theirs[j]]) for i, j, mask in found]"""


REAL_AND_PADDING = """None if cu_seqlens is None else torch.stack(
        (cu_seqlens_padded[:-1], cu_seqlens_padded[:-1] + cu_seqlens.diff()), 1).flatten()"""


MENDED = {
    "prefix_hidden_in_skipped_tiles": (
        "elif mine[rows].max() >= theirs[keys].min():",
        "elif min(theirs[keys].min() - mine[rows].max(), theirs[keys].min() - self.prefix + 1) <= 0:",
    ),
    "sinks_once_a_block": ("if call.sinks is not None:", "if last and call.sinks is not None:"),
    "joint_tokens_once_a_rank": (
        "        joint_k, joint_v = call.joint\n        if",
        "        joint_k, joint_v = call.joint\n        if last and",
    ),
    "rear_joint_tokens_travel": ("(call.rear or step == 0)", "step == 0"),
    "own_padding_for_all_blocks": (
        "found = [(i, j, (none if mask is None else mask) | self.padding[:, j]) for i, j, mask in found]",
        WHOLE_PADDING,
    ),
    "real_boundaries_for_padded_tensors": ("scale, cu_seqlens))", f"scale, {REAL_AND_PADDING}))"),
    "segment_ids_as_float32": ("segment_ids.to(torch.float32)", "segment_ids"),
    "documents_by_their_number_and_sum": ("KNOWN.setdefault(key, cu_seqlens.clone())", "cu_seqlens"),
    "sinks_by_their_sum": ("KNOWN.setdefault(key, sinks.float().clone())", "sinks"),
    "sinks_by_version": ("(None, 0))[:2] != (id(sinks), sinks._version)", "(0, 0))[:2] != ()"),
    "alibi_by_local_distance": ("torch.arange(q.shape[2])", "positions[ring.rank]"),
    "scale_of_the_values": ("scale = v.shape[-1]", "scale = q.shape[-1]"),
}
"""For each wrong ring the fault in its text, and the right text: with that the ring honours the argument."""


def mended(name: str) -> Any:
    """Return the function of a wrong ring with its fault repaired."""
    wrong, right = MENDED[name]
    source = MUTANTS[name].source()
    assert source.count(wrong) == 1
    module = MUTANTS[name].module()
    space: dict[str, Any] = {"__name__": module.__name__}
    sys.modules[module.__name__] = module
    exec(compile(source.replace(wrong, right), f"<{name}, mended>", "exec"), space)
    return space["attend"]


@pytest.mark.parametrize("name", MENDED)
def test_an_argument_that_is_honoured_passes(name: str) -> None:
    report = quick(mended(name), only=(MUTANTS[name].found_by,))
    assert failed(report) == {}
    assert report.findings[-1].applies and not report.findings[-1].evidence.startswith("refused")


def test_wrong_slopes_of_each_sequence_fail_only_a_target_that_claims_them() -> None:
    attend = MUTANTS["slopes_of_the_first_sequence"].module().__dict__["attend"]
    for claimed, verdict, said in ((True, False, ""), (None, True, "alibi"), (False, True, "")):
        report = quick(Target(attend, slopes_of_each=claimed), only=("alibi",))
        assert report.findings[-1].ok == verdict
        assert (f"accepted with wrong results: {said}" in report.left_open) == bool(said)


def test_segment_ids_differ_by_one_and_by_what_a_conversion_cuts_off() -> None:
    """Each set has ids that become equal when they are converted to any of the dtypes for which the set is made."""
    for numbers, dtypes in {
        "above 2²⁴": (torch.float32, torch.bfloat16, torch.int8, torch.int16),
        "above 2³¹": (torch.float32, torch.int32),
        "above 2⁵³": (torch.float64,),
    }.items():
        ids = torch.tensor(NUMBERED[numbers])
        assert len(ids.unique()) == len(ids)
        assert all(len(ids.to(dtype).unique()) < len(ids) for dtype in dtypes)


def test_segment_ids_have_gaps_and_come_in_no_order() -> None:
    ascending, mixed = (torch.tensor(NUMBERED[numbers]) for numbers in ("with gaps", "in no order"))
    assert (ascending.diff() > 0).all() and (ascending.diff() > 1).any()
    assert (mixed.diff() > 0).any() and (mixed.diff() < 0).any()


def test_values_that_pairs_does_not_ask_about_are_judged_on_one_rank_too() -> None:
    def attend(q, k, v, *, ring, layout, causal, cu_seqlens=None):
        documents = () if cu_seqlens is None else tuple(cu_seqlens.diff().tolist())
        documents = documents if ring.world_size > 1 or len(documents) < 100 else ()
        mask = Mask(causal, documents=documents)
        return ring_attention(q, k, v, ring=ring, layout=layout, mask=mask, return_lse=True)

    found = failed(quick(attend, only=("documents",), layouts=("contiguous",), ranks=(1, 3)))["documents"]
    assert "first: out" in found and "(P=1" in found and "301 of them" in found


def test_a_run_with_slopes_of_each_sequence_has_the_results_of_each_sequence_alone() -> None:
    run = Run(1, 12, "contiguous", True, B=2, alibi=1.0, slopes_of_each=True)
    q, k, v, _ = (x.double() for x in inputs(run))
    at = torch.arange(12.0, dtype=torch.float64)
    true, _ = expected(run.plain)
    for batch, slopes in enumerate(slopes_of(run).double()):
        scores = q[batch] @ k[batch].mT / 4 - slopes[:, None, None] * (at[:, None] - at).abs()
        out = scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ v[batch]
        torch.testing.assert_close(torch.from_numpy(true.out[batch]), out)


def dropping(change: str = "", seeded: bool = True) -> Any:
    """Return ringlab's ring with the given fault in its dropout."""

    def attend(q, k, v, *, ring, layout, causal, dropout=0.0, seed=0):
        seed = {"one seed": 5, "": seed}.get(change, seed)
        rates = {"half as many": dropout / 2, "the share to keep": 1 - dropout if dropout else 0.0}
        rate = rates.get(change, dropout)
        out = ring_attention(q, k, v, ring=ring, layout=layout, causal=causal, dropout=rate, seed=seed)
        return out * (1 - dropout) if change == "not scaled" else out

    def unseeded(q, k, v, *, ring, layout, causal, dropout_p=0.0):
        return attend(q, k, v, ring=ring, layout=layout, causal=causal, dropout=dropout_p, seed=3)

    return attend if seeded else unseeded


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", ""),
        ("one seed", "two seeds drop the same pairs"),
        ("half as many", "% of the weights are dropped, asked for were 25%"),
        ("the share to keep", "% of the weights are dropped, asked for were 25%"),
        ("not scaled", "beyond"),
    ],
)
def test_dropout_is_looked_at_pair_by_pair(change: str, words: str) -> None:
    (_, finding) = quick(dropping(change), only=("dropout",), layouts=("zigzag",)).findings
    assert finding.ok == (not words) and words in finding.evidence


def test_dropout_without_a_seed_is_asked_what_one_call_shows() -> None:
    (_, finding) = quick(dropping(seeded=False), only=("dropout",), layouts=("zigzag",)).findings
    assert finding.ok and "1 runs" in finding.evidence


def test_backward_with_other_dropped_pairs_is_found() -> None:
    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Any, *qkv: Tensor) -> Tensor:
            ctx.call, ctx.qkv = call, qkv
            with torch.no_grad():
                return call(*qkv)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            leaves = [x.detach().requires_grad_() for x in ctx.qkv]
            with torch.enable_grad():
                return None, *torch.autograd.grad(ctx.call(*leaves, again=1), leaves, dout)

    def attend(q, k, v, *, ring, layout, causal, dropout=0.0, seed=0):
        def call(*qkv: Tensor, again: int = 0) -> Tensor:
            options = {"dropout": dropout, "seed": seed + again if dropout else None}
            return ring_attention(*qkv, ring=ring, layout=layout, causal=causal, **options)

        return Attend.apply(call, q, k, v)

    (_, finding) = quick(attend, only=("dropout",), layouts=("contiguous",)).findings
    assert not finding.ok and "d" in finding.evidence.split(" error ")[0]


def gathers(q, k, v, *, ring, positions, sliding_window=None, **others):
    """Compute full attention over the gathered keys of all ranks, however many keys each rank has."""
    k, v = (ring.all_gather(x) for x in (k, v))
    k, v = (torch.cat(x, dim=2).repeat_interleave(q.shape[1] // x[0].shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_cross_attention_and_other_values_are_honoured_by_a_gather() -> None:
    target = Target(gathers, causal=(False,), layouts=("contiguous",), schedule="any", backward=False)
    report = quick(target, only=("cross-attention", "value dims"))
    assert failed(report) == {} and all("closest" in each.evidence for each in report.findings[1:])
    names = {"window", "soft cap", "sinks"}
    ignoring = quick(target, only=tuple(names))
    assert set(ignoring.failed) == names
    assert all("accepted and ignored" in each.evidence for each in ignoring.findings[1:])


def test_a_ring_that_refuses_other_lengths_and_dims_passes() -> None:
    report = quick(plain_ring.attend, only=("cross-attention", "value dims"))
    assert failed(report) == {} and all("refused: raised" in each.evidence for each in report.findings[1:])


def test_a_layout_may_cut_each_document_by_itself() -> None:
    """A layout may deal each padded document to the ranks by zig-zag, as kernels for packed sequences do."""
    asked: list[tuple[int, ...]] = []

    def by_document(S: int, P: int, documents: tuple[int, ...]) -> list[Any]:
        asked.append(documents)
        layout = per_document(documents or (S,), P)
        return [layout.positions(rank) for rank in range(P)]

    def attend(q, k, v, *, ring, positions, causal, cu_seqlens=None):
        name = "boundaries_divided_by_the_ranks"
        space = MUTANTS[name].module().__dict__
        return space["attend"](ring, q, k, v, causal=causal, positions=positions)

    target = Target(attend, layouts={"by document": by_document}, causal=(True,))
    report = quick(target, only=("forward", "documents"))
    assert report.failed == ["documents"] and {(), (12, 12), (5, 0, 1, 13, 5)} <= set(asked)


def test_documents_divide_by_twice_the_ranks_where_a_layout_cuts_each_by_itself() -> None:
    def by_document(S: int, P: int, documents: tuple[int, ...]) -> list[Any]:
        layout = per_document(documents or (S,), P)
        return [layout.positions(rank) for rank in range(P)]

    def attend(q, k, v, *, cu_seqlens=None):
        return q

    (asked,) = [each for each in ARGUMENT_CHECKS if each.name == "documents"]
    for ranks in ((1,), (2,), (3,), (4,), (16,)):
        claims = as_target(attend, layouts={"own": by_document}, ranks=ranks, ragged=False).claims()
        runs = asked.runs(Plan(claims, quick=True, seed=0))
        lengths = [length for run in runs for length in run.documents]
        assert all(length % (2 * ranks[0]) == 0 for length in lengths) and 0 in lengths
        assert all(sum(run.documents) in (0, run.S) for run in runs)


def test_options_that_fix_an_argument_are_no_argument() -> None:
    def attend(q, k, v, *, ring, positions, causal, dropout=0.0, window=None, **others):
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    names = ("window", "soft cap", "sinks", "dropout")
    assert quick(attend, only=names).failed == ["window", "soft cap", "sinks", "dropout"]
    fixed = {"dropout": 0.0, "window": None, "sliding_window": None, "softcap": None, "s_aux": None}
    report = quick(Target(attend, options=fixed), only=names)
    assert failed(report) == {} and not any(each.applies for each in report.findings[1:])


def test_an_argument_is_asked_with_every_mask() -> None:
    """An argument is checked with every mask: this target uses sinks only under the causal mask."""
    attend = mended("sinks_once_a_block")

    def causal_only(ring, q, k, v, *, causal, positions, sinks=None):
        return attend(ring, q, k, v, causal=causal, positions=positions, sinks=sinks if causal else None)

    assert quick(causal_only, only=("sinks",)).failed == ["sinks"]


def test_a_window_to_the_left_is_asked_under_a_causal_mask_only() -> None:
    def attend(q, k, v, *, causal=False, window_left=-1):
        return q

    (asked,) = [each for each in ARGUMENT_CHECKS if each.name == "window"]
    plan = Plan(as_target(attend).claims(), quick=True, seed=0)
    assert asked.needs(plan) is None and {run.causal for run in asked.runs(plan)} == {True}
    assert asked.needs(Plan(as_target(attend, causal=(False,)).claims(), quick=True, seed=0))


def test_an_error_of_the_targets_own_layout_refuses_nothing() -> None:
    def by_document(S: int, P: int, documents: tuple[int, ...]) -> list[Any]:
        if documents:
            raise ValueError("documents of another kind")
        return [range(rank * S // P, (rank + 1) * S // P) for rank in range(P)]

    def attend(q, k, v, *, ring, positions, causal, cu_seqlens=None):
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    (_, finding) = quick(Target(attend, layouts={"own": by_document}), only=("documents",)).findings
    assert (
        not finding.ok
        and "the layout 'own' fails with ValueError: documents of another kind" in finding.evidence
    )


def test_dropout_that_drops_whole_keys_or_repeats_in_a_batch_is_found() -> None:
    def whole_keys(q, k, v, *, ring, layout, causal, dropout=0.0, seed=0):
        mine = torch.from_numpy(layout.positions(ring.rank))
        kept = torch.rand(layout.S, generator=torch.Generator().manual_seed(seed)) >= dropout
        factors = kept[mine].to(v) / (1 - dropout)
        return ring_attention(q, k, v * factors[:, None], ring=ring, layout=layout, causal=causal)

    def like_the_first(q, k, v, *, ring, layout, causal, dropout=0.0, seed=0):
        options = {
            "ring": ring,
            "layout": layout,
            "causal": causal,
            "dropout": dropout,
            "seed": seed if dropout else None,
        }
        each = [ring_attention(*(x[[batch]] for x in (q, k, v)), **options) for batch in range(len(q))]
        return torch.cat(each)

    for target, words in (
        (whole_keys, "dropped in the same way"),
        (like_the_first, "in two places: batch 0"),
    ):
        (_, finding) = quick(target, only=("dropout",), layouts=("contiguous",)).findings
        assert not finding.ok and words in finding.evidence


def test_padding_is_a_document_of_its_own_whose_rows_are_not_looked_at() -> None:
    run = Run(2, 16, "contiguous", True, documents=(5, 4), pads=(3, 4))
    assert run.padded == (5, 3, 4, 4) == run.mask.documents
    assert run.padding.nonzero()[0].tolist() == [5, 6, 7, 12, 13, 14, 15]
    assert (inputs(run)[3][:, :, run.padding] == 0).all()
    true, _ = expected(run.plain)
    assert (true.dk[:, :, run.padding] == 0).all() and (true.dv[:, :, run.padding] == 0).all()
    assert str(run).endswith("documents (5, 4), padding (3, 4)")
    assert run.with_padding == (8, 8) and Run(2, 24, "contiguous", True, pads=(5,)).with_padding == ()
    front = Run(2, 16, "contiguous", True, pads=(-5,))
    assert front.padded == (5, 11) and front.padding.nonzero()[0].tolist() == [0, 1, 2, 3, 4]
    assert not front.mask.visible(np.arange(5, 16), np.arange(5)).any()


def test_joint_tokens_count_once_and_their_gradients_are_left_out() -> None:
    run = Run(2, 8, "contiguous", False, joint="front", K=1)
    q, k, v, dout = (x.double() for x in inputs(run))
    joint = [x.double() for x in joint_of(run)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (torch.cat(pair, 2).expand(-1, 2, -1, -1) for pair in zip(joint, leaves[1:], strict=True))
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
    gradients = torch.autograd.grad(out, leaves, dout)
    true, limits = expected(run.plain)
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        torch.testing.assert_close(torch.from_numpy(getattr(true, name)), value.detach())
        assert 0 < limits[name] < 1e-4
    assert joint[0].shape[2] == JOINT and sinks_of(run).shape == (2,)


def test_masks_that_an_argument_needs_are_claimed_or_it_is_not_asked() -> None:
    def attend(q, k, v, *, joint_k=None, joint_v=None, prefix=0):
        return q

    def reasons(causal: bool) -> dict[str, str | None]:
        plan = Plan(as_target(attend, causal=(causal,)).claims(), quick=True, seed=0)
        return {each.name: each.needs(plan) for each in ARGUMENT_CHECKS}

    without, masked = reasons(False), reasons(True)
    nothing = "the target computes nothing without a causal mask"
    assert masked["joint tokens"] == nothing and masked["prefix"] is masked["cross-attention"] is None
    assert without["prefix"] == "the target computes no causal mask" and without["joint tokens"] is None


def test_an_argument_that_is_refused_is_no_failure_and_one_that_is_dropped_is() -> None:
    def refuses(q, k, v, *, ring, positions, causal, sliding_window=None):
        if sliding_window is not None:
            raise NotImplementedError("no windows")
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    def drops(q, k, v, *, ring, positions, causal, sliding_window=None):
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    (_, refused), (_, dropped) = (quick(f, only=("window",)).findings for f in (refuses, drops))
    assert (
        refused.ok
        and refused.applies
        and "refused: raised: NotImplementedError: no windows" in refused.evidence
    )
    assert not dropped.ok and "accepted and ignored" in dropped.evidence


def test_packed_documents_come_under_every_name_of_the_field() -> None:
    """Packed documents are passed under every common name; each of these functions uses another name."""

    def masked(ring: Any, layout: Any, documents: tuple[int, ...], qkv: tuple[Tensor, ...]) -> Any:
        mask = Mask(documents=documents)
        return ring_attention(*qkv, ring=ring, layout=layout, mask=mask, return_lse=True)

    def by_cu_seqlens(q, k, v, *, ring, layout, cu_seqlens=None):
        lengths = () if cu_seqlens is None else tuple(cu_seqlens.diff().tolist())
        return masked(ring, layout, lengths, (q, k, v))

    def by_segments(q, k, v, *, ring, layout, segment_ids=None):
        if segment_ids is None:
            return masked(ring, layout, (), (q, k, v))
        whole = torch.zeros(layout.S, dtype=torch.int64)
        whole[torch.from_numpy(layout.positions(ring.rank))] = segment_ids
        whole = ring.all_reduce(whole)
        lengths = tuple(whole.unique_consecutive(return_counts=True)[1].tolist())
        return masked(ring, layout, lengths, (q, k, v))

    for function in (by_cu_seqlens, by_segments):
        report = quick(function, only=("documents",), causal=(True,), layouts=("zigzag",), ranks=(3,))
        assert failed(report) == {} and report.findings[-1].applies


def varlen(ring: Any, layout: Any, causal: bool, cu_seqlens: Tensor | None, *qkv: Tensor) -> Any:
    documents = () if cu_seqlens is None else tuple(cu_seqlens.diff().tolist())
    return ring_attention(*qkv, ring=ring, layout=layout, mask=Mask(causal=causal, documents=documents))


def test_an_error_for_one_packing_only_is_no_refusal() -> None:
    def fails_on_empty_ones(q, k, v, *, ring, layout, causal, cu_seqlens=None):
        if cu_seqlens is not None and not cu_seqlens.diff().all():
            raise RuntimeError("an illegal memory access")
        return varlen(ring, layout, causal, cu_seqlens, q, k, v)

    (_, finding) = quick(fails_on_empty_ones, only=("documents",), layouts=("contiguous",)).findings
    assert not finding.ok and "refused here and not elsewhere: raised: RuntimeError" in finding.evidence


def test_an_error_about_the_form_of_an_argument_is_no_verdict() -> None:
    def wants_a_list(q, k, v, *, ring, layout, causal, cu_seqlens=None):
        if cu_seqlens is not None:
            cu_seqlens.append(0)
        return varlen(ring, layout, causal, None, q, k, v)

    (_, finding) = quick(wants_a_list, only=("documents",)).findings
    assert finding.ok and not finding.applies and "could not be asked" in finding.evidence


def test_required_lengths_are_given_to_every_run() -> None:
    def attend(q, k, v, cu_seqlens, max_seqlen, *, ring, layout, causal):
        assert max_seqlen == int(cu_seqlens.diff().max())
        return varlen(ring, layout, causal, cu_seqlens, q, k, v)

    assert failed(quick(attend, only=("forward", "dk", "documents"), layouts=("zigzag",))) == {}


def test_rows_of_padding_must_be_finite() -> None:
    """NaN in rows of padding reaches all tokens in the next layer's norm of the gradient."""

    def attend(
        q, k, v, *, ring, layout, causal, cu_seqlens=None, held=lambda out: torch.full_like(out, torch.nan)
    ):
        out, lse = ring_attention(
            q, k, v, ring=ring, layout=layout, return_lse=True,
            mask=Mask(causal) if cu_seqlens is None else Mask.of_cu_seqlens(whole(cu_seqlens, q, ring), causal=causal),
        )  # fmt: skip
        if cu_seqlens is not None:
            padding = torch.from_numpy(layout.positions(ring.rank) >= int(cu_seqlens[-1]))
            out = torch.where(padding[:, None], held(out), out)
        return out, lse

    def whole(ends: Tensor, q: Tensor, ring: Any) -> Tensor:
        return torch.cat((ends, ends.new_tensor([q.shape[2] * ring.world_size]))).unique()

    claims: dict[str, Any] = {"only": ("pairs",), "layouts": ("zigzag",), "ranks": (2,), "ragged": False}
    assert failed(quick(partial(attend, held=torch.zeros_like), **claims)) == {}
    for wrong in (attend, partial(attend, held=torch.empty_like)):  # memory may hold anything
        assert "out is not finite in rows of padding" in failed(quick(wrong, **claims))["pairs"]


class _Gathered(torch.autograd.Function):
    """Gathers all ranks' tokens; backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, ring: Any, x: Tensor) -> Tensor:
        ctx.ring, ctx.tokens = ring, x.shape[2]
        return torch.cat(ring.all_gather(x), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        whole = ctx.ring.all_reduce(gradient.double())
        return None, whole[:, :, ctx.ring.rank * ctx.tokens :][:, :, : ctx.tokens].to(gradient.dtype)


def over_all(ring, q, k, v, visible, *, causal=False, bias=None, changed=None, sinks=None) -> Tensor:
    """Attend to the keys of all ranks, whose shards are contiguous and equal.

    visible: a function of the positions of rows and keys. changed: a function of the scores and these positions.
    """
    rows = (torch.arange(q.shape[2]) + ring.rank * q.shape[2])[:, None]
    k, v = (_Gathered.apply(ring, x).repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    keys = torch.arange(k.shape[2])
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5 + (0 if bias is None else bias.double())
    scores = scores if changed is None else changed(scores, rows, keys)
    seen = visible(rows, keys) & ((rows >= keys) | (not causal))
    scores = scores.masked_fill(~seen, -1e30)  # and no −inf, because rows of padding may see no key
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    return (scores.softmax(-1)[..., : len(keys)] @ v).to(q.dtype)


def everything(rows: Tensor, keys: Tensor) -> Tensor:
    return (rows == rows) & (keys == keys)


def asked(attend: Any, *only: str, **claims: Any) -> Any:
    """Return the report of the checks `only` about a target that gathers the keys of all ranks, two by default."""
    usual: dict[str, Any] = {"layouts": ("contiguous",), "schedule": "any", "ragged": False, "ranks": (2,)}
    return quick(Target(attend, **{**usual, **claims}), only=only)


def test_arguments_of_opposite_masks_and_keys_of_another_sequence_are_asked_in_pairs() -> None:
    """A prefix requires a causal mask and cross-attention forbids it, so each is paired without the other."""

    def attend(q, k, v, *, ring, causal, prefix=0):
        def seen(rows: Tensor, keys: Tensor) -> Tensor:
            return (keys < prefix) | (rows >= keys) | (not causal)

        return over_all(ring, q, k, v, seen)

    report = asked(attend, "pairs", "cross-attention", "prefix")
    assert failed(report) == {} and all(each.applies for each in report.findings)
    assert "refused" not in report.findings[-1].evidence


def test_slopes_of_alibi_are_asked_with_two_values() -> None:
    def attend(q, k, v, *, ring, causal, alibi_slopes=None):
        def biased(scores: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
            usual = torch.tensor([2.0 ** -(1 + head % 4) for head in range(q.shape[1])])
            return scores if alibi_slopes is None else scores - usual[:, None, None] * (keys - rows).abs()

        return over_all(ring, q, k, v, everything, causal=causal, changed=biased)

    assert "ALiBi slopes 0.0625" in failed(asked(attend, "alibi"))["alibi"]


def by_sequence(wrong: bool) -> Any:
    """Return a target that takes segment ids (B, L). wrong: it uses those of the first sequence for all."""

    def attend(q, k, v, *, ring, causal, segment_ids=None):
        ids = None if segment_ids is None else torch.cat(ring.all_gather(segment_ids), dim=1)
        ids = ids[:1].expand(len(q), -1) if wrong and ids is not None else ids

        def apart(scores: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
            if ids is None:
                return scores
            return scores.masked_fill((ids[:, rows] != ids[:, None])[:, None], -1e30)

        return over_all(ring, q, k, v, everything, causal=causal, changed=apart)

    return attend


@pytest.mark.parametrize("wrong", [False, True])
def test_documents_of_each_sequence_are_one_of_two_forms(wrong: bool) -> None:
    report = asked(by_sequence(wrong), "documents", "pairs")
    assert report.failed == (["documents"] if wrong else [])
    assert wrong or "documents of each sequence" in evidence(report, "documents")


@pytest.mark.parametrize("what", ["right", "refused", "wrong", "few are wrong"])
def test_key_value_heads_that_the_ranks_do_not_divide_are_repeated_or_refused(what: str) -> None:
    def attend(q, k, v, *, ring, causal):
        H, K = q.shape[1], k.shape[1]
        if what == "refused" and K % ring.world_size:
            raise ValueError(f"{ring.world_size} ranks cannot divide {K} heads")
        heads = torch.arange(H) * K // H
        if (what == "wrong" and K > ring.world_size and K % ring.world_size) or (
            what == "few are wrong" and 1 < K < ring.world_size
        ):
            heads = torch.arange(H) % K
        return over_all(ring, q, k[:, heads], v[:, heads], everything, causal=causal)

    report = asked(attend, "uneven heads", "grouped heads", split_heads=True, ranks=(2, 4))
    assert report.failed == (["uneven heads"] if "wrong" in what else [])


@pytest.mark.parametrize("split", [True, False])
def test_a_target_without_grouped_heads_is_never_asked_about_them(split: bool) -> None:
    def attend(q, k, v, *, ring, causal, sinks=None, alibi_slopes=None):
        if q.shape[1] != k.shape[1] or (split and k.shape[1] % ring.world_size):
            raise ValueError(f"{q.shape[1]} query heads and {k.shape[1]} key/value heads")
        biased = None
        if alibi_slopes is not None:
            biased = lambda scores, rows, keys: scores - alibi_slopes[:, None, None] * (keys - rows).abs()  # noqa: E731
        return over_all(ring, q, k, v, everything, causal=causal, **({"changed": biased} if biased else {}))

    checks = ["masks", "alibi", "uneven heads", "pairs", "strided"]
    report = asked(attend, *checks, split_heads=split, grouped=False)
    assert report.failed == [] and "key/value heads" not in evidence(report, "alibi") + evidence(
        report, "pairs"
    )


@pytest.mark.parametrize("wrong", [False, True])
def test_a_bias_of_each_score_is_asked_with_both_masks(wrong: bool) -> None:
    def attend(q, k, v, *, ring, causal, attn_bias=None):
        bias = attn_bias if attn_bias is None or not wrong else attn_bias[:, :1]
        return over_all(ring, q, k, v, everything, causal=causal, bias=bias)

    report = asked(attend, "alibi", "pairs")
    assert report.failed == (["alibi"] if wrong else []) and report.findings[1].applies


def window(sides: str) -> Any:
    """Return a target with a window of two sides. sides: the values that it reads wrongly, or "" for none."""

    def attend(q, k, v, *, ring, causal, window_size=None):
        left, right = (-1, -1) if window_size is None else window_size
        right = left if sides == "equal" else right
        left, right = (
            max(side, 0) if sides == "no limit is 0" and max(left, right) >= 0 else side
            for side in (left, right)
        )

        def near(rows: Tensor, keys: Tensor) -> Tensor:
            return ((rows - keys <= left) | (left < 0)) & ((keys - rows <= right) | (right < 0))

        return over_all(ring, q, k, v, near, causal=causal)

    return attend


@pytest.mark.parametrize(
    ("sides", "found"), [("", []), ("equal", ["window", "pairs"]), ("no limit is 0", ["window", "pairs"])]
)
def test_windows_are_asked_with_unequal_sides_and_no_limit(sides: str, found: list[str]) -> None:
    assert asked(window(sides), "window", "pairs").failed == found


@pytest.mark.parametrize("wrong", [False, True])
def test_padding_is_asked_where_it_differs_between_sequences(wrong: bool) -> None:
    def attend(q, k, v, *, ring, causal, key_padding_mask=None):
        padding = torch.zeros(q.shape[0], q.shape[2] * ring.world_size, dtype=torch.bool)
        if key_padding_mask is not None:
            padding = torch.cat(ring.all_gather(key_padding_mask.contiguous()), dim=1)
        padding = padding[:1] if wrong else padding
        hidden = padding[:, None, None]
        return over_all(ring, q, k, v, lambda rows, keys: everything(rows, keys) & ~hidden, causal=causal)

    assert asked(attend, "padding", "pairs").failed == (["padding"] if wrong else [])


@pytest.mark.parametrize("wrong", [False, True])
def test_padding_is_asked_beyond_a_shard(wrong: bool) -> None:
    """A shard may be padding alone. The wrong target takes such a shard for one without padding."""

    def attend(q, k, v, *, ring, causal, key_padding_mask=None):
        mine = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool)
        if key_padding_mask is not None and not (wrong and key_padding_mask.all()):
            mine = key_padding_mask.contiguous()
        hidden = torch.cat(ring.all_gather(mine), dim=1)[:, None, None]
        return over_all(ring, q, k, v, lambda rows, keys: everything(rows, keys) & ~hidden, causal=causal)

    assert asked(attend, "padding").failed == (["padding"] if wrong else [])


@pytest.mark.parametrize("wrong", [False, True])
def test_documents_are_asked_with_other_keys_than_queries(wrong: bool) -> None:
    def attend(q, k, v, *, ring, cu_seqlens_q=None, cu_seqlens_k=None):
        def same(rows: Tensor, keys: Tensor) -> Tensor:
            if cu_seqlens_q is None:
                return everything(rows, keys)
            of_keys = cu_seqlens_q if wrong else cu_seqlens_k
            documents = (
                torch.bucketize(at, ends, right=True) for at, ends in ((rows, cu_seqlens_q), (keys, of_keys))
            )
            return torch.eq(*documents)

        return over_all(ring, q, k, v, same)

    report = asked(attend, "documents", "pairs")
    assert report.failed == (["documents"] if wrong else []) and report.findings[1].applies


def chunked(shift: Any, **claims: Any) -> Any:
    """Return the finding about cross-attention whose causal mask is shifted by `shift(queries, keys)` tokens."""

    def attend(q, k, v, *, ring, causal):
        later = shift(ring.world_size * q.shape[2], ring.world_size * k.shape[2])
        seen = (lambda rows, keys: rows + later >= keys) if causal else everything
        return over_all(ring, q, k, v, seen)

    return asked(attend, "cross-attention", **claims).findings[-1]


def test_more_keys_than_queries_are_asked_under_a_causal_mask_by_either_alignment() -> None:
    at_the_end, at_the_start = (lambda rows, keys: keys - rows), (lambda rows, keys: 0)
    assert "aligned bottom-right: " in chunked(at_the_end).evidence
    assert "aligned top-left: " in chunked(at_the_start).evidence
    in_between = chunked(lambda rows, keys: (keys - rows) // 2)
    assert in_between.ok and "accepted with wrong results: " in in_between.evidence
    assert not chunked(lambda rows, keys: (keys - rows) // 2, cross=True).ok
    assert chunked(at_the_start, alignment="top-left").ok
    assert not chunked(at_the_start, alignment="bottom-right").ok
    with pytest.raises(BackendError, match="alignment= one of"):
        as_target(over_all, alignment="middle").claims()


def learned(argument: str, how: str) -> Any:
    """Return a target that treats the gradient of an argument as `how` says.

    how: "right"; "half" or "none" of it; "first rank", so that other ranks give none; or "refused".
    """

    def seen(x: Tensor, rank: int) -> Tensor:
        if how == "refused" and x.requires_grad:
            raise NotImplementedError("an argument that needs a gradient")
        if how == "none" or (how == "first rank" and rank):
            return x.detach()
        return (x + x.detach()) / 2 if how == "half" else x

    def with_sinks(q, k, v, *, ring, causal, sinks=None):
        given = None if sinks is None else seen(sinks, ring.rank)
        return over_all(ring, q, k, v, everything, causal=causal, sinks=given)

    def with_bias(q, k, v, *, ring, causal, attn_bias=None):
        given = None if attn_bias is None else seen(attn_bias, ring.rank)
        return over_all(ring, q, k, v, everything, causal=causal, bias=given)

    def with_slopes(q, k, v, *, ring, causal, alibi_slopes=None):
        def biased(scores: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
            return scores - seen(alibi_slopes, ring.rank).double()[:, None, None] * (rows - keys).abs()

        changed = None if alibi_slopes is None else biased
        return over_all(ring, q, k, v, everything, causal=causal, changed=changed)

    def with_a_scale(q, k, v, *, ring, causal, scale: float | Tensor | None = None):
        if scale is not None:
            q = q * (seen(scale, ring.rank) if isinstance(scale, Tensor) else scale) * q.shape[-1] ** 0.5
        return over_all(ring, q, k, v, everything, causal=causal)

    return {"sinks": with_sinks, "bias": with_bias, "slopes": with_slopes, "scale": with_a_scale}[argument]


@pytest.mark.parametrize("argument", ["sinks", "bias", "slopes", "scale"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("right", "closest to its bound"),
        ("refused", "refused: raised: NotImplementedError: an argument that needs a gradient"),
        ("none", "no gradient, and no error says so"),
        ("first rank", "a gradient on some ranks only"),
        ("half", "the gradient of "),
    ],
)
def test_a_trained_argument_gets_its_gradient_or_an_error(argument: str, how: str, words: str) -> None:
    finding = asked(learned(argument, how), "trained arguments").findings[-1]
    assert finding.ok == (how in ("right", "refused")) and words in finding.evidence


def test_a_scale_that_is_a_number_is_not_trained() -> None:
    def attend(q, k, v, *, ring, causal, scale=None):
        return over_all(ring, q if scale is None else q * scale * q.shape[-1] ** 0.5, k, v, everything)

    assert not asked(attend, "trained arguments", causal=(False,)).findings[-1].applies


def windowed(q, k, v, *, ring, causal, window=None, by="both"):
    """Attend through a window of one number. Without a causal mask, all values of `by` but "twice" are usual meanings."""

    def seen(rows: Tensor, keys: Tensor) -> Tensor:
        later = {"both": window, "left": 10_000, "past": 1, "twice": 2 * (window or 0)}[by]
        return everything(rows, keys) if window is None else (rows - keys < window) & (keys - rows < later)

    return over_all(ring, q, k, v, seen, causal=causal)


@pytest.mark.parametrize("by", ["both", "left", "past", "twice"])
def test_a_window_of_one_number_may_have_each_of_its_meanings(by: str) -> None:
    """Without a claim, each of three meanings passes, also in combinations. With a claim, only that meaning passes."""
    report = asked(partial(windowed, by=by), "window", "pairs")
    assert report.failed == ([] if by != "twice" else ["window", "pairs"])
    assert ("one number limits" in evidence(report, "window")) == (by in ("left", "past"))
    for meaning in ("both", "left", "past"):
        assert asked(partial(windowed, by=by), "window", window=meaning).ok == (by == meaning)
    with pytest.raises(BackendError, match="window= one of"):
        as_target(windowed, window="middle").claims()


@pytest.mark.parametrize("guarded", [False, True])
def test_a_ring_for_self_attention_alone_is_not_wrong(guarded: bool) -> None:
    """A ring that cannot compute more keys than queries passes. If it does not refuse them, the report ends with that."""

    def attend(q, k, v, *, ring, causal):
        if guarded and k.shape != q.shape:
            raise ValueError("as many keys as queries are needed")
        return over_all(ring, q, *(x[:, :, : q.shape[2]] for x in (k, v)), everything, causal=causal)

    plain = asked(attend, "cross-attention", grouped=False)
    said = "accepted with wrong results: cross-attention"
    assert plain.ok and (said in repr(plain)) == (said in summary(plain)) == (not guarded)
    assert plain.findings[-1].applies == guarded
    assert asked(attend, "cross-attention", grouped=False, cross=True).ok == guarded
    assert not asked(attend, "cross-attention", grouped=False, cross=False).findings[-1].applies


def flexible(by: str, wrong: bool) -> Any:
    """Return a target that takes one of FlexAttention's functions. wrong: it counts rows from the start of its shard."""

    def attend(ring, q, k, v, mask_mod, score_mod):
        batch, head = torch.zeros((), dtype=torch.int64), torch.arange(q.shape[1])[:, None, None]
        own = ring.rank * q.shape[2] if wrong else 0

        def seen(rows: Tensor, keys: Tensor) -> Tensor:
            return everything(rows, keys) if mask_mod is None else mask_mod(batch, head, rows - own, keys)

        def changed(scores: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
            return scores if score_mod is None else score_mod(scores, batch, head, rows - own, keys)

        return over_all(ring, q, k, v, seen, changed=changed)

    def by_mask(q, k, v, *, ring, mask_mod=None):
        return attend(ring, q, k, v, mask_mod, None)

    def by_block_mask(q, k, v, *, ring, block_mask=None):
        return attend(ring, q, k, v, None if block_mask is None else block_mask.mask_mod, None)

    def by_score(q, k, v, *, ring, score_mod=None):
        return attend(ring, q, k, v, None, score_mod)

    return {"mask_mod": by_mask, "block_mask": by_block_mask, "score_mod": by_score}[by]


@pytest.mark.parametrize("by", ["mask_mod", "block_mask", "score_mod"])
def test_functions_of_flex_attention_carry_every_mask(by: str) -> None:
    only = ("forward", "masks", "window", "documents", "prefix", "soft cap", "alibi", "pairs")
    right, wrong = (asked(flexible(by, each), *only) for each in (False, True))
    assert right.failed == [] and right.not_asked == ()
    left = {each.name for each in right.findings if not each.applies}
    assert left == (set() if by == "score_mod" else {"soft cap", "alibi"})
    assert {"masks", "window"} <= {*wrong.failed} and "forward" not in wrong.failed


def test_unequal_shards_have_a_place_in_pairs() -> None:
    def attend(q, k, v, *, ring, layout, causal, window=None, softcap=None, wrong=False):
        cap = None if wrong and layout.S % layout.P else softcap
        return ring_attention(
            q, k, v, ring=ring, layout=layout, mask=Mask(causal, window), softcap=cap, return_lse=True
        )

    claims: dict[str, Any] = {"only": ("soft cap", "pairs"), "layouts": ("contiguous", "zigzag")}
    assert failed(quick(attend, **claims)) == {}
    found = failed(quick(partial(attend, wrong=True), **claims))
    assert [*found] == ["pairs"] and "more tokens=5" in found["pairs"]


def test_dropout_has_a_place_in_pairs() -> None:
    """`pairs` finds a target that does not scale kept weights by 1/(1 − p) under no_grad."""

    def attend(q, k, v, *, ring, layout, causal, dropout=0.0, seed=0, wrong=False):
        out, lse = ring_attention(
            q, k, v, ring=ring, layout=layout, causal=causal, dropout=dropout, seed=seed if dropout else None, return_lse=True
        )  # fmt: skip
        return (out * (1 - dropout) if wrong and not torch.is_grad_enabled() else out), lse

    claims: dict[str, Any] = {"only": ("dropout", "pairs"), "layouts": ("contiguous", "zigzag")}
    assert failed(quick(attend, **claims)) == {}
    found = failed(quick(partial(attend, wrong=True), **claims))
    assert [*found] == ["pairs"] and "dropout" in found["pairs"] and "way=no_grad" in found["pairs"]


def test_an_argument_that_one_layout_alone_takes_is_asked_there_and_said_so() -> None:
    def attend(q, k, v, *, ring, layout, causal, window=None, softcap=None, wrong=""):
        if window and layout.name == "zigzag":
            raise NotImplementedError("windows of contiguous shards")
        window = None if wrong == "always" or (wrong == "no_grad" and not torch.is_grad_enabled()) else window
        mask = Mask(causal, window)
        return ring_attention(q, k, v, ring=ring, layout=layout, mask=mask, softcap=softcap, return_lse=True)

    claims: dict[str, Any] = {"only": ("window", "pairs"), "layouts": ("contiguous", "zigzag")}
    (_, alone, pairs) = quick(attend, **claims).findings
    assert alone.ok and alone.evidence.startswith("only contiguous causal: ")
    assert "zigzag causal, zigzag full" in alone.evidence
    assert pairs.ok and "window with layout=zigzag" in pairs.evidence
    assert quick(partial(attend, wrong="always"), **claims).failed == ["window"]
    assert quick(partial(attend, wrong="no_grad"), **claims).failed == ["pairs"]


def test_a_refusal_on_one_rank_alone_names_the_numbers_of_ranks() -> None:
    def attend(q, k, v, *, ring, layout, causal, cu_seqlens=None):
        documents = () if cu_seqlens is None else tuple(cu_seqlens.diff().tolist())
        if documents and ring.world_size == 1:
            raise NotImplementedError("no documents on one rank")
        mask = Mask(causal, documents=documents)
        return ring_attention(q, k, v, ring=ring, layout=layout, mask=mask, return_lse=True)

    claims: dict[str, Any] = {"layouts": ("zigzag",), "causal": (True,)}
    found = evidence(quick(attend, only=("documents",), **claims), "documents")
    assert "only P=3 zigzag causal: " in found and "(P=1 zigzag causal)" in found, found


def one_at_a_time(
    q, k, v, *, ring, layout, causal, window=None, softcap=None, prefix=0, cu_seqlens=None, lost=True
):
    """Run ringlab's ring with one argument at most. If `lost`, a window has no effect on 4 ranks."""
    if sum(map(bool, (window, softcap, prefix, cu_seqlens is not None))) > 1:
        raise NotImplementedError("one argument at a time")
    documents = () if cu_seqlens is None else tuple(cu_seqlens.diff().tolist())
    window = None if lost and ring.world_size == 4 else window
    mask = Mask(causal, window, prefix, documents)
    return ring_attention(q, k, v, ring=ring, layout=layout, mask=mask, softcap=softcap, return_lse=True)


def test_settings_that_are_refused_together_hide_no_other_pair() -> None:
    claims: dict[str, Any] = {"only": ("pairs",), "layouts": ("contiguous", "zigzag")}
    (_, right) = quick(partial(one_at_a_time, lost=False), **claims).findings
    assert right.ok and "packed documents (6, 12), (0, 6);" in right.evidence
    for other in ("window", "prefix", "packed documents"):
        assert f"{other} with soft cap" in right.evidence or f"soft cap with {other}" in right.evidence
    evidence = failed(quick(one_at_a_time, **claims))["pairs"]
    assert re.match(r"wrong only where window \d+ comes with P=4; ", evidence)


def test_a_pair_that_is_refused_for_one_value_is_named_by_its_values() -> None:
    def attend(q, k, v, *, ring, layout, causal, window=None, softcap=None, lost=False):
        if window and q.dtype == torch.float64:
            raise NotImplementedError("no windows in float64")
        softcap = None if lost and q.dtype == torch.float64 and layout.name == "zigzag" else softcap
        mask = Mask(causal, window)
        return ring_attention(q, k, v, ring=ring, layout=layout, mask=mask, softcap=softcap, return_lse=True)

    (_, right) = quick(attend, only=("pairs",), layouts=("contiguous", "zigzag")).findings
    assert right.ok and "window 3 with dtype=float64" in right.evidence
    assert "window 3 with dtype=float32" not in right.evidence
    wrong = failed(quick(partial(attend, lost=True), only=("pairs",), layouts=("contiguous", "zigzag")))
    assert "comes with" in wrong["pairs"] and "dtype=float64" in wrong["pairs"]


def test_a_table_leaves_out_what_no_row_can_contain() -> None:
    """A table leaves out a pair of values that fits, but leaves no value for a third axis."""
    axes = {"a": (None, 1), "b": (None, 1), "c": (0, 1)}

    def fits(chosen: Any) -> bool:
        return (chosen.get("a"), chosen.get("c")) != (1, 0) and (chosen.get("b"), chosen.get("c")) != (1, 1)

    rows = covering_pairs(axes, fits)
    assert all(map(fits, rows)) and not any(row["a"] == row["b"] == 1 for row in rows)
    assert covering_pairs(axes, fits, covered=rows) == []


@pytest.mark.parametrize("argument", ["softcap", "sinks", "v"])
def test_a_fast_path_on_one_rank_is_asked_with_each_argument_alone(argument: str) -> None:
    """A fast path that ignores one argument is found, although it is right without arguments."""

    def attend(q, k, v, *, ring, layout, causal, softcap=None, sinks=None):
        kept = {"softcap": softcap, "sinks": sinks}
        if ring.world_size == 1 and q.shape == k.shape and not causal:
            v = v.flip(1) if argument == "v" and v.shape != k.shape else v
            kept.pop(argument, None)
        return ring_attention(q, k, v, ring=ring, layout=layout, causal=causal, return_lse=True, **kept)

    found = failed(quick(attend, only=("soft cap", "sinks", "value dims", "pairs")))
    assert "pairs" in found and {*found} <= {"pairs", "sinks"}
    assert "P=1" in found["pairs"] and "heads=(2, 2)" in found["pairs"]
