"""Checks of the messages, memory and computation that a ring promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps

import numpy as np
import torch

from ringlab.conformance.checks.arguments import asked_of, takes_lengths, window_is_clear
from ringlab.conformance.checks.check import Check, Judge, Measure, Plan, Verdict, needs_ring
from ringlab.conformance.run.run import Meter, Ran, Run
from ringlab.conformance.target.claims import RING

_SHARE = 64
"""The number of tokens per rank in metered runs."""
_MANY, _NARROW = 128, 8
LISTS = 4 * 8
"""The bytes per token of four int64 lists of all positions, because a rank may know where every token is.

The lists are small compared with K and V, except in narrow runs."""
_LONGER = ((256, 480, 576), (1_536,))
"""The numbers of tokens per rank in runs that check excess work again, in two stages.

A ring pads if its tiles are longer than its shards, or do not divide them. At one or more of these lengths,
most tiles of up to 256 tokens, and all tiles of 16, 32, 48, 64, 96, 128, 192 and 256 tokens, pad by less than
MORE_WORK. The lengths of the first stage are short, because small tiles take long in Python, and because the
longest length takes seconds."""
_D, _WIDE = 64, 128
"""The head dim of metered runs, and that of longer ones, because some tiles pad the head dim to 128."""
_SAME = 1.02
"""The factor below which excesses at several lengths count as equal. Excesses by padding differ by more."""
MORE_WORK = 1.1
"""The allowed factor over the matrix products that attention needs.

It leaves room for small products, such as one that computes delta: it takes 2 D FLOPs a row, where the row's
own tile alone takes 10 · 64 D. One more product for each tile would give a factor of 1.2."""
PRODUCTS = {"forward": 2, "backward": 5}
"""The number of matrix products for each pair of a query and a visible key; each takes 2 D FLOPs.

Forward: S = Q Kᵀ and P V. Backward: S again because P is not kept, then dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K and
dK = dSᵀ Q. A ring that keeps P needs four in backward."""


def _metered(plan: Plan, P: int, **changes: object) -> Run:
    """Return a metered run with 64 tokens per rank and one key/value head."""
    run = plan.run(P, P * _SHARE, D=_D, H=2, K=1, meter=True)
    return Run(**{**run.__dict__, **changes})


def _full(plan: Plan) -> list[Run]:
    dtypes = plan.dtypes("float32", "bfloat16")
    return [_metered(plan, P, dtype=dtype) for P in plan.ranks(2, 4) for dtype in dtypes]


def _state_bytes(run: Run) -> int:
    """Return the bytes of one rank's dK and dV together, in at least float32."""
    dtype = getattr(torch, run.dtype)
    return run.block_bytes // dtype.itemsize * torch.promote_types(dtype, torch.float32).itemsize


def _unseen(ran: Ran) -> bool:
    """Return whether the first recorded pass sent nothing."""
    return ran.run.P > 1 and not any(meter.sent for meter in ran.forward or ran.backward)


_PIECES = 8
"""The number of pieces of like size in which a block may travel, so that the first is used while others arrive."""


@dataclass(frozen=True)
class _Most:
    """The bytes and the messages that a rank may send in one pass, and the meaning of the bytes."""

    sent: int
    exchanges: int
    meaning: str


def _of_blocks(run: Run) -> dict[str, _Most]:
    """Return the most that each pass sends if K and V travel, and dK and dV with them in backward."""
    hops, P = run.P - 1, run.P
    block, state = run.block_bytes, _state_bytes(run)
    backward = f"{hops} hops of K and V, {P} of dK and dV in float32"
    return {
        "forward": _Most(hops * block, 2 * hops, f"{hops} hops of K and V"),
        "backward": _Most(hops * block + P * state, 2 * hops + 2 * P, backward),
    }


def _of_queries(run: Run) -> dict[str, _Most]:
    """Return the most that each pass sends if queries travel, with their results so far."""
    hops, P = run.P - 1, run.P
    rows = run.B * run.H * run.S // P
    q, state = rows * run.D * getattr(torch, run.dtype).itemsize, rows * run.D * 4
    forward = f"{hops} hops of Q, {P} of out and its sums in float32"
    backward = f"{hops} hops of Q, out, dout and their sums, {P} of dQ in float32"
    return {
        "forward": _Most(hops * q + P * (state + 8 * rows), 4 * P, forward),
        "backward": _Most(hops * (3 * q + 8 * rows) + P * state, 6 * P, backward),
    }


def _most(ran: Ran) -> dict[str, _Most]:
    """Return the most that each pass may send: as in a query ring if it sends queries, else as in a ring of K and V.

    A backward may repeat the forward, as under activation checkpointing, if both its messages and its products
    show it.
    """
    run = ran.run
    most = _of_blocks(run)
    if _repeats_forward(ran):
        forward, backward = most["forward"], most["backward"]
        most["backward"] = _Most(
            forward.sent + backward.sent,
            forward.exchanges + backward.exchanges,
            f"the forward again, and {backward.meaning}",
        )
    for which, meters in (("forward", ran.forward), ("backward", ran.backward)):
        if any(meter.sends_queries for meter in meters):
            most[which] = _of_queries(run)[which]
    return most


def _alike(meter: Meter) -> bool:
    """Return whether all messages are known to be of like size, as the pieces of blocks are."""
    smallest, largest = meter.sizes
    return 0 < largest <= _PIECES * smallest


def _both_ways(ran: Ran) -> bool:
    """Return whether each rank sends to both neighbours in forward; its gradients may then go home in one message."""
    P = ran.run.P
    sides = [{(peer - rank) % P for peer in meter.peers} for rank, meter in enumerate(ran.forward)]
    return P > 2 and bool(sides) and all(each == {1, P - 1} for each in sides)


def _repeats_forward(ran: Ran) -> bool:
    """Return whether the messages and the products of the backward are those of a forward and a backward."""
    forward, backward = (sum(meter.flops for meter in meters) for meters in (ran.forward, ran.backward))
    again = forward * (PRODUCTS["forward"] + PRODUCTS["backward"]) / PRODUCTS["forward"]
    beyond = max((meter.sent for meter in ran.backward), default=0) > _of_blocks(ran.run)["backward"].sent
    return beyond and again / MORE_WORK < backward < again * MORE_WORK


def _bytes(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    figures = []
    for ran in rans:
        run, most = ran.run, _most(ran)
        if _unseen(ran):
            return Verdict(False, f"no message was seen on {run.P} ranks ({run})")
        for which, meters in (("forward", ran.forward), ("backward", ran.backward)):
            if not meters:
                continue
            sent, allowed = max(meter.sent for meter in meters), most[which].sent
            figures.append(f"{which} {sent:,} of {allowed:,} (P={run.P} {run.dtype})")
            if sent > allowed:
                return Verdict(
                    False,
                    f"{which} sends {sent:,} bytes a rank, {sent / allowed:.3g} times the {allowed:,} of {most[which].meaning} ({run})",
                    run,
                )
    return Verdict(True, f"bytes sent by a rank, of those allowed: {'; '.join(figures[:4])}")


def _rounds(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: messages go only to neighbours, and there are no more than needed."""
    for ran in rans:
        run, most = ran.run, _most(ran)
        if _unseen(ran):
            return Verdict(False, f"no message was seen on {run.P} ranks ({run})")
        for which, meters in (("forward", ran.forward), ("backward", ran.backward)):
            allowed = most[which].exchanges
            for rank, meter in enumerate(meters):
                strangers = [peer for peer in meter.peers if (peer - rank) % run.P not in (1, run.P - 1)]
                if len(strangers) > (which == "backward" and _both_ways(ran)):
                    return Verdict(
                        False,
                        f"{which}: rank {rank} sends to rank {strangers[0]}, no neighbour of its ({run})",
                        run,
                    )
                if meter.exchanges > allowed * (_PIECES if _alike(meter) else 1):
                    return Verdict(
                        False,
                        f"{which}: rank {rank} sends {meter.exchanges} times, {allowed} at most are needed ({run})",
                        run,
                    )
                if meter.collectives:
                    return Verdict(
                        False,
                        f"{which}: rank {rank} calls {', '.join(meter.collectives)}, no exchange with a neighbour ({run})",
                        run,
                    )
    last = rans[-1]
    which, meters = ("forward", last.forward) if last.forward else ("backward", last.backward)
    return Verdict(True, f"{meters[0].exchanges} sends {which} on {last.run.P} ranks, to neighbours only")


def _large(plan: Plan) -> list[Run]:
    """Return pairs of runs on few and on more ranks.

    There are pairs without a mask on the first and the last layout, and a pair with a mask on the last
    layout.
    """
    claims = plan.claims
    first, last = claims.layouts[0], claims.layouts[-1]
    ways = dict.fromkeys([(claims.causal[0], first), (claims.causal[0], last), (claims.causal[-1], last)])
    dtype = plan.dtypes("float32")[0]
    return [
        _metered(plan, P, H=2, K=2, dtype=dtype, causal=causal, layout=layout)
        for causal, layout in ways
        for P in plan.ranks(4, 8)
    ]


def _narrow(plan: Plan) -> list[Run]:
    """Return a pair of runs with many tokens and few dims.

    In these runs a mask of a rank's rows against all tokens is larger than the rank's K and V.
    """
    return [
        replace(run, S=run.P * _MANY, D=_NARROW, H=1, K=1) for run in _large(plan)[-len(plan.ranks(4, 8)) :]
    ]


def _gather(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: no tensor may be as large as the whole K, or a rank's scores with all keys."""
    figures = []
    for ran in rans[len(plan.ranks(4, 8)) - 1 :: len(plan.ranks(4, 8))]:
        run, itemsize = ran.run, getattr(torch, ran.run.dtype).itemsize
        whole = run.B * run.K * run.S * run.D * itemsize
        for which, meters in (("forward", ran.forward), ("backward", ran.backward)):
            for rank, meter in enumerate(meters):
                if meter.largest >= whole:
                    return Verdict(
                        False,
                        f"{which}: rank {rank} makes a tensor of {meter.largest:,} bytes; the whole K, or the scores of its rows with every key of one head, have {whole:,} ({run})",
                        run,
                    )
        largest = max(meter.largest for meter in (*ran.forward, *ran.backward))
        mask = "causal" if run.causal else "full"
        figures.append(f"{largest:,} bytes {mask}; the whole K has {whole:,} (P={run.P}, S={run.S})")
    return Verdict(True, f"largest tensor {', '.join(figures)}")


def _memory(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: each additional rank must need less than a third of a K/V block more memory.

    All runs have the same number of tokens per rank. In narrow runs, lists of positions are not counted. A
    right ring may receive some blocks before it computes with them, or keep some sums afterwards, and on 4
    ranks it has fewer steps for this than on 8. So a ring that needs more memory is run on 16 ranks too, and
    then only the growth from 8 to 16 counts. If it cannot be run on 16 ranks, the limit is half a block.
    """
    numbers, made = plan.ranks(4, 8), {ran.run: ran for ran in rans}
    if len(numbers) < 2:  # with 3 ranks all blocks may be there at once: in use, arriving, being sent
        return Verdict(True, "does not apply: two numbers of ranks of at least 4 are needed")
    pairs = [(ran, made[_doubled(ran.run)]) for ran in rans if ran.run.P == numbers[0]]
    share = _THIRD
    grown = [many.run for few, many in pairs if _growth(few, many, share)]
    if grown and not (2 * numbers[-1] in plan.claims.ranks and plan.claims.over == RING):
        # Use the larger limit: 16 ranks are not claimed, or would be processes, which start too slowly.
        share = _HALF
    elif grown:
        more = tuple(map(_doubled, grown))
        if not made.keys() >= {*more}:
            return Verdict(False, "needs more memory on 8 ranks than on 4", grown[0], more=more)
        pairs = [(made[run], made[_doubled(run)]) for run in grown]
    for few, many in pairs:
        if evidence := _growth(few, many, share):
            return Verdict(False, evidence, many.run)
    few, many = pairs[0]
    figures = [_peaks_in_words(few, many, which) for few, many in pairs for which in ("forward", "backward")]
    ranks = f"{few.run.P} → {many.run.P} ranks"
    return Verdict(True, f"peak in K/V blocks, {ranks} of equal shards: {', '.join(figures)}")


_THIRD, _HALF = 1 / 3, 1 / 2
"""A ring fails if its peak grows by this number of K/V blocks, or more, for each additional rank.

A ring that keeps every K, or every V, grows by half a block."""


def _doubled(run: Run) -> Run:
    """Return the same run on twice as many ranks, with shards of the same length."""
    return replace(run, P=2 * run.P, S=2 * run.S)


def _growth(few: Ran, many: Ran, share: float) -> str:
    """Return the growth of the peak in words if it is too large, else "".

    The growth is too large if it is at least `share` of a K/V block for each additional rank.
    """
    run, additional = many.run, many.run.P - few.run.P
    lists = LISTS * (run.S - few.run.S) if run.D == _NARROW else 0
    for which in ("forward", "backward"):
        if _peak(many, which) - _peak(few, which) >= share * additional * run.block_bytes + lists:
            peaks = _peaks_in_words(few, many, which).removeprefix(f"{which} ").replace("→", "to")
            each = f"{few.run.P} to {run.P} ranks of {run.S // run.P} tokens each"
            return f"{which}: the peak grows from {peaks} K/V blocks, from {each} ({run})"
    return ""


def _peaks_in_words(few: Ran, many: Ran, which: str) -> str:
    block = many.run.block_bytes
    return f"{which} {_peak(few, which) / block:.2f} → {_peak(many, which) / block:.2f}"


def _peak(ran: Ran, which: str) -> int:
    return max((meter.peak for meter in getattr(ran, which)), default=0)


def _work_runs(plan: Plan) -> list[Run]:
    P = plan.ranks(4, 8)[0]
    runs = [_metered(plan, P, causal=False)] if False in plan.claims.causal else []
    runs += [
        _metered(plan, P, causal=True, layout=layout)
        for layout in ("contiguous", "zigzag")
        if layout in plan.claims.layouts and True in plan.claims.causal
    ]
    return runs


_NEAR = 9
"""The window of metered runs: a small part of a block, so that a row sees only keys of its own block and of
adjacent ones."""


def _with_arguments(plan: Plan) -> list[Run]:
    """Return runs with a window, and runs with documents; both hide whole blocks that the mask alone shows.

    Only a target that gets the lengths of all documents has runs with documents, because a rank that knows only
    the ids of its own tokens does not know which blocks it needs. Each document but the first and the last lies
    on two shards.
    """
    taken = {each.what: each for each in asked_of(plan, ("window", "packed documents"))}
    plain = [run for run in _work_runs(plan) if run.layout in ("contiguous", "zigzag")]
    windows = [
        replace(run, **{**taken["window"].changes(plan, run, 0), "window": _NEAR})
        for run in plain
        if "window" in taken and window_is_clear(plan, run)
    ]
    documents = "packed documents" in taken and takes_lengths(plan)
    return [*windows, *(_packed(run) for run in plain if documents)]


def _packed(run: Run) -> Run:
    """Return the run with documents that begin and end in the middle of shards."""
    tokens = run.S // run.P
    return replace(run, documents=(tokens // 2, *[tokens] * (run.P - 1), tokens - tokens // 2))


def _needed(ran: Ran) -> float:
    """Return the share of the S² pairs that a ring needs if it skips each block that no row of the rank sees.

    It may compute the other blocks as it does without the argument: the rank's own block whole, and of another
    block each pair of chunks in which, without the argument, some row sees some key. So tiles need not be
    smaller than shards.
    """
    run = ran.run
    seen, plain = run.visible()[0, 0], replace(run, window=0, window_of="", documents=()).visible()[0, 0]
    pairs = 0
    for rank, rows in enumerate(ran.positions):
        for origin, keys in enumerate(ran.positions):
            if not seen[np.ix_(rows, keys)].any():
                continue
            chunks = [(i, j) for i in _chunks(rows) for j in _chunks(keys)]
            pairs += sum(len(i) * len(j) for i, j in chunks if origin == rank or plain[np.ix_(i, j)].any())
    return pairs / run.S**2


def _chunks(positions: np.ndarray) -> list[np.ndarray]:
    """Return the contiguous stretches of the positions."""
    return np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)


def _work(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: every tile may be computed only once in forward and once in backward.

    Under a causal mask, a rank needs the tiles of its own block, and of half of the other blocks. A ring
    whose tiles do not fit the shards computes padding. So a ring that does too much work gets longer shards,
    and only the smallest excess of all lengths counts. An excess that is the same at several lengths is not
    padding. If plain runs pass, there are also runs with a window and with documents, which the target may
    refuse.
    """
    figures, over = [], list[tuple[Run, str]]()
    more, settled = dict[Run, None](), False
    for of_mask in _by_mask(rans):
        run, made = of_mask[0].run, [ran for ran in of_mask if ran.trouble is None]
        if not made:
            trouble = of_mask[0].trouble
            if trouble is None or not trouble.refuses:
                return Verdict(False, f"{trouble} ({run})", run)
            figures.append(f"refused{_given(run)}: {trouble}")
            continue
        without = (run.P + 1) / (2 * run.P) if run.causal else 1.0
        share = _needed(made[0]) if _given(run) else without
        mask = f"{run.layout} {'causal' if run.causal else 'full'}{_given(run)}"
        for which in ("forward", "backward"):
            shares = {ran.run: _share_of_all_pairs(ran, which) for ran in made if getattr(ran, which)}
            if not all(shares.values()):
                return Verdict(
                    True,
                    f"does not apply: no product of matrices was seen {which}, so work cannot be counted",
                )
            if not shares:
                continue
            least = min(shares, key=lambda each: shares[each])
            done = shares[least]
            if which == "backward" and _repeats_forward(of_mask[0]):
                done *= PRODUCTS["backward"] / (PRODUCTS["forward"] + PRODUCTS["backward"])
            padded = (
                "" if least == run else f" at {least.S // least.P:,} tokens per rank, as shorter shards pad"
            )
            figures.append(f"{which} {mask} {done:.3f} of {share:.3f}{padded}")
            if done <= MORE_WORK * share:
                continue
            same = len(shares) > 1 and max(shares.values()) < _SAME * done
            settled |= same
            if len(made) == len(of_mask):
                more |= dict.fromkeys(_longer(run, tokens) for tokens in _next_lengths(of_mask))
            tiles = "S² pairs are needed" if share == 1.0 else f"{share:.3f} of S² is enough"
            text = f"{which} computes {done:.3g} of the S² pairs{_given(run)}, where {tiles}"
            skips = (
                '; a ring that computes hidden blocks claims allow={"work": "reason"}' if _given(run) else ""
            )
            over.append((run, f"{text} ({least}){_of_lengths(of_mask, same)}{skips}"))
    if over:
        return Verdict(False, over[0][1], over[0][0], more=() if settled else tuple(more))
    asked = {ran.run for ran in rans}
    left = tuple(run for run in _with_arguments(plan) if run not in asked)
    return Verdict(True, f"shares of the S² pairs computed, of those needed: {'; '.join(figures)}", more=left)


def _given(run: Run) -> str:
    return " with a window" if run.window else " with packed documents" if run.documents else ""


def _flops_of_all_pairs(run: Run, which: str) -> int:
    return PRODUCTS[which] * 2 * run.B * run.H * run.S**2 * run.D


def _share_of_all_pairs(ran: Ran, which: str) -> float:
    return sum(meter.flops for meter in getattr(ran, which)) / _flops_of_all_pairs(ran.run, which)


def _by_mask(rans: Sequence[Ran]) -> list[list[Ran]]:
    """Return the runs of each mask, layout and argument, the shortest first."""
    found: dict[tuple[bool, str, str], list[Ran]] = {}
    for ran in sorted(rans, key=lambda ran: ran.run.S):
        found.setdefault((ran.run.causal, ran.run.layout, _given(ran.run)), []).append(ran)
    return list(found.values())


def _tokens(rans: Sequence[Ran]) -> list[int]:
    return [ran.run.S // ran.run.P for ran in rans]


def _next_lengths(rans: Sequence[Ran]) -> tuple[int, ...]:
    """Return the first stage of `_LONGER` that the runs of one mask lack, or ()."""
    return next((stage for stage in _LONGER if not {*stage} <= {*_tokens(rans)}), ())


def _longer(run: Run, tokens: int) -> Run:
    """Return the same run with `tokens` tokens per rank, and a wide head dim."""
    longer = replace(run, S=tokens * run.P, D=_WIDE)
    return _packed(longer) if run.documents else longer


def _of_lengths(rans: Sequence[Ran], same: bool) -> str:
    """Return words on whether the runs of one mask show that an excess is not padding of tiles."""
    failed = next((ran for ran in rans if ran.trouble is not None), None)
    lengths = ", ".join(str(tokens) for tokens in _tokens(rans))
    if same:
        return f"; as much at {lengths} tokens per rank, so it is no padding of tiles"
    if failed is not None:
        return f"; it may be padding of tiles, but longer shards have no result: {failed.trouble}"
    return f"; padding of tiles is not the cause, as this is the least at {lengths} tokens per rank"


def _work_needs(plan: Plan) -> str | None:
    return needs_ring(plan) or (None if _work_runs(plan) else "no layout in whole chunks is claimed")


def _or_claim_none(judge: Judge) -> Judge:
    """Return the judge; its failing verdicts also name the claim of a target that does not promise a ring's costs."""

    @wraps(judge)
    def judged(plan: Plan, rans: Sequence[Ran]) -> Verdict:
        verdict = judge(plan, rans)
        remedy = "; a design that sends or keeps more than a ring claims nothing about that: --schedule any"
        return verdict if verdict.ok else replace(verdict, evidence=verdict.evidence + remedy)

    return judged


RESOURCE_CHECKS = (
    Check("rounds", "messages to one neighbour, no more than P − 1 hops need", "quick", Measure.MESSAGES, _full, _or_claim_none(_rounds), needs_ring),
    Check("bytes", "bytes sent, forward and backward, in the inputs' dtype, heads not repeated", "quick", Measure.MESSAGES, _full, _or_claim_none(_bytes), needs_ring),
    Check("gather", "no tensor as large as the whole sequence", "quick", Measure.MEMORY, _large, _or_claim_none(_gather), needs_ring),
    Check("peak memory", "more ranks of equal shards take no more memory", "quick", Measure.MEMORY, lambda plan: [*_large(plan), *_narrow(plan)], _or_claim_none(_memory), needs_ring),
    Check("work", "tiles computed once, forward and backward, and none that no row sees; with a window or documents too, no block that no row sees", "quick", Measure.WORK, _work_runs, _or_claim_none(_work), _work_needs, spares_more=True, rounds=5),
)  # fmt: skip
