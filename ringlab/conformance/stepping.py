"""Checks of a whole training step: token ids in, the loss and the gradients of all weights on P ranks as on one.

Most faults of training over several ranks lie around the ring: in labels, positions, counts of tokens, sums of gradients. No
oracle knows the model, but the step itself on one rank does, and laws hold for every model: the loss of a batch is the mean
over its labels, no label sees a later token, and documents that are packed into one sequence do not see each other.

The function is called with those of these arguments that it has parameters for, by name:

    ring comm group rank world_size   as a ring is (see `ringlab.conformance.target`)
    tokens                            or input_ids: (B, S) int64 below 32, the whole batch on every rank
    labels                            (B, S): label i is token i, or −100 where it does not count; position i − 1 predicts it
    cu_seqlens                        or position_ids, segment_ids, document_ids: packed documents, (B, S) but for the first
    micro_batches replicas            or other names of these, see `OPTIONS`: into how many parts the sequences are cut
    recompute evaluate                or other names: activations made again in backward; the loss without gradients

It returns the loss, or (loss, gradients): whole ones on every rank, as a mapping, a sequence or the model that holds them. It
makes its own model, with the same weights at each call, in float32 or float64, without dropout.

Two results are equal if they differ by at most √ε of the largest value of the same gradient, half the digits of its dtype, and
by 64 ε of the largest of all gradients, for those that are 0 but for rounding. Rounding stays below that by far, and what
moves one label among the batch's 192 moves more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ringlab.conformance.calls import Calls, Check, report
from ringlab.conformance.runner import LIMIT, Report
from ringlab.conformance.step_cases import LENGTH, OPTIONS, PACKED, SEQUENCES, TOKENS, Case, Result, result
from ringlab.conformance.target import parameters
from ringlab.errors import BackendError

StepCalls: TypeAlias = Calls[Case, Result]


def _with_plain(case: Case) -> list[Case]:
    return [case.plain, case]


def _equal(calls: StepCalls, case: Case) -> str:
    return _loss(calls, case) or _gradients(calls, case)


def _loss(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(case.plain, case)
    return _loss_differs(true, found, case)


def _gradients(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(case.plain, case)
    return _gradients_differ(true, found, case)


def _twice(case: Case) -> list[Case]:
    return [case, replace(case, again=True)]


def _repeated(calls: StepCalls, case: Case) -> str:
    (true, *_), again = calls.of(*_twice(case))
    wrong = _loss_differs(true, again, case) or _gradients_differ(true, again, case)
    return wrong.replace("on one rank", "in the call before")


def _loss_differs(true: Result, ranks: list[Result], case: Case) -> str:
    losses = [each.loss for each in ranks]
    for rank, loss in enumerate(losses):
        if not abs(loss - true.loss) <= true.room:
            cause = _factor(losses, true, rank)
            return f"the loss on rank {rank} is {loss:.6g}, and {true.loss:.6g} on one rank{cause} ({case})"
    return ""


def _gradients_differ(true: Result, ranks: list[Result], case: Case) -> str:
    largest = max((np.abs(x).max(initial=0.0) for x in true.gradients.values()), default=0.0)
    for rank, each in enumerate(ranks):
        if unlike := sorted(true.gradients.keys() ^ each.gradients.keys()):
            return f"{unlike[0]} has a gradient on rank {rank} or on one rank, and not on both ({case})"
        for name, right in true.gradients.items():
            found = each.gradients[name]
            if found.shape != right.shape:
                return f"the gradient of {name} on rank {rank} is {found.shape} for {right.shape} ({case})"
            errors = np.nan_to_num(np.abs(found - right), nan=np.inf)
            allowed = math.sqrt(true.epsilon) * np.abs(right).max(initial=0.0) + 64 * true.epsilon * largest
            if errors.max(initial=0.0) > allowed:
                at = np.unravel_index(int(errors.argmax()), errors.shape)
                place = f"{name}[{', '.join(map(str, at))}]" if at else name
                cause = (
                    _times(float((found * right).sum() / (right * right).sum()), len(ranks))
                    if right.any()
                    else ""
                )
                return f"the gradient of {place} on rank {rank} is {found[at]:.6g}, and {right[at]:.6g} on one rank{cause} ({case})"
    return ""


def _factor(losses: list[float], true: Result, rank: int) -> str:
    """A likely cause of a wrong loss, in words."""
    if max(losses) - min(losses) > true.room:
        for found, words in ((sum(losses), "sum"), (sum(losses) / len(losses), "mean")):
            if abs(found - true.loss) <= true.room:
                return f": the {words} over ranks would be right"
    return _times(losses[rank] / true.loss if true.loss else math.nan, len(losses))


def _times(ratio: float, P: int) -> str:
    for factor, words in ((P, f": {P} times as much"), (1 / P, f": 1/{P} of it")):
        if P > 1 and abs(ratio / factor - 1) < 1e-3:
            return words
    return ""


def _moves(calls: StepCalls, case: Case, token: int) -> bool:
    """Whether another value of `token` moves the loss of a case."""
    (before, *_), (after, *_) = calls.of(case, replace(case, changed=token))
    return abs(before.loss - after.loss) > before.room


def _one_by_one(case: Case) -> list[Case]:
    return [replace(case, labels=(place,)) for place in case.labels if isinstance(place, int)]


def _mean(calls: StepCalls, case: Case) -> str:
    """The loss of two labels is the mean of those of each alone."""
    *parts, found = calls.of(*_one_by_one(case), case)
    true = replace(parts[0][0], loss=sum(part[0].loss for part in parts) / len(parts))
    return _loss_differs(true, found, case).replace("on one rank", "as the mean of each label's")


def _label(case: Case) -> int:
    return int(case.labels[0])


def _around_the_label(case: Case) -> list[Case]:
    return [case, *(replace(case, changed=token) for token in (_label(case) - 1, _label(case), case.S - 1))]


def _ahead(calls: StepCalls, case: Case) -> str:
    for each in _around_the_label(case)[1:]:
        token = each.changed or 0
        if _moves(calls, case, token) != (token == _label(case) - 1):
            verb = "moves" if token >= _label(case) else "does not move"
            return f"label {_label(case)} alone counts, and token {token} {verb} the loss ({case})"
    return ""


def _each_alone(case: Case) -> list[Case]:
    return [replace(case.plain, document=d) for d, length in enumerate(case.documents) if length > 1]


def _alone(calls: StepCalls, case: Case) -> str:
    """Packed loss and gradients are means over labels of those of each document by itself."""
    *parts, found = calls.of(*_each_alone(case), case)
    counts = [length - 1 for length in case.documents if length > 1]
    shares = [(count / sum(counts), part[0]) for count, part in zip(counts, parts, strict=True)]
    names = shares[0][1].gradients
    true = Result(
        sum(share * part.loss for share, part in shares),
        {name: np.sum([share * part.gradients[name] for share, part in shares], axis=0) for name in names},
        shares[0][1].epsilon,
    )
    return _loss_differs(true, found, case) or _gradients_differ(true, found, case)


def _other_documents(calls: StepCalls, case: Case) -> str:
    """A token of another document moves nothing. The probe needs no second implementation."""
    if _moves(calls, case, 0):
        return f"token 0, of document 0, moves the loss of label {_label(case)}, of document 1 ({case})"
    own = _label(case) - 1
    return (
        "" if _moves(calls, case, own) else f"token {own} does not move the loss of label {own + 1} ({case})"
    )


def _two_tokens(case: Case) -> list[Case]:
    return [case, replace(case, changed=0), replace(case, changed=_label(case) - 1)]


def _around_ends(P: int) -> list[int]:
    """Labels around each place where a contiguous or zig-zag layout may cut, the first and the last."""
    cuts = range(LENGTH // (2 * P), LENGTH, LENGTH // (2 * P))
    return sorted({1, LENGTH - 1, *(cut + d for cut in cuts for d in (-1, 0, 1))})


def _docs(P: int, *lengths: int) -> Case:
    return Case(P, sum(lengths), 1, documents=lengths)


CHECKS: tuple[Check[Case, Result], ...] = (
    Check("repeatable", "the same loss and gradients in a second call", lambda ranks: [Case(1)], _twice, _repeated),
    Check("loss", "the loss on P ranks, on each of them", lambda ranks: [Case(P) for P in ranks], _with_plain, _loss),
    Check("gradients", "the gradients of all weights on P ranks, on each of them", lambda ranks: [Case(P) for P in ranks], _with_plain, _gradients),
    Check("every label", "the loss of one label, around the ends of shards", lambda ranks: [Case(P, labels=(j,)) for P in ranks for j in _around_ends(P)], _with_plain, _loss, ("labels",)),
    Check("uneven labels", "labels that count on some ranks only", lambda ranks: [Case(P, labels="late") for P in ranks], _with_plain, _equal, ("labels",)),
    Check("mean of labels", "the loss of two labels is the mean of each alone", lambda ranks: [Case(P, labels=(5, 40)) for P in (1, *ranks)], lambda case: [*_one_by_one(case), case], _mean, ("labels",)),
    Check("look-ahead", "a label's loss moves with the token before it, and with no later one", lambda ranks: [Case(P, labels=(j,)) for P in (1, *ranks) for j in (1, LENGTH // 2, LENGTH // 2 + 1)], _around_the_label, _ahead, ("labels",)),
    Check("ragged", "lengths that the ranks do not divide", lambda ranks: [Case(P, S) for P in ranks for S in (26, 7)], _with_plain, _equal, ("ragged",)),
    Check("micro-batches", "gradients summed over parts with unequal numbers of labels", lambda ranks: [Case(P, labels="late", micro_batches=n) for P in (1, *ranks[:1]) for n in (2, SEQUENCES)], _with_plain, _equal, ("micro_batches", "labels")),
    Check("recomputation", "activations made again in backward", lambda ranks: [Case(P, recompute=True) for P in ranks[:2]], _with_plain, _equal, ("recompute",)),
    Check("evaluation", "the loss without gradients", lambda ranks: [Case(P, evaluate=True) for P in (1, *ranks)], _with_plain, _loss, ("evaluate",)),
    Check("replicas", "sequences dealt to replicas, tokens to the ranks of each", lambda ranks: [Case(2 * n, labels=which, replicas=2) for n in (1, 2) for which in ("all", "late")], _with_plain, _equal, ("replicas", "labels")),
    Check("packed", "packed documents on P ranks", lambda ranks: [each for P in ranks for each in (_docs(P, 24, 24), _docs(P, 7, 1, 30, 10))], _with_plain, _equal, ("packed",)),
    Check("documents", "packed documents as each by itself", lambda ranks: [each for P in (1, *ranks) for each in (_docs(P, 24, 24), _docs(P, 7, 1, 30, 10))], lambda case: [*_each_alone(case), case], _alone, ("packed",)),
    Check("other documents", "a token of one document moves no label of another", lambda ranks: [replace(_docs(P, 20, 28), labels=(47,)) for P in (1, *ranks)], _two_tokens, _other_documents, ("packed", "labels")),
    Check("empty documents", "boundaries that are repeated at the end", lambda ranks: [_docs(P, 20, 28, 0, 0) for P in ranks], _with_plain, _equal, ("cu_seqlens",)),
)  # fmt: skip
"""The checks, in the order in which they are reported."""


def check_step(
    target: Any,
    *,
    ranks: Sequence[int] = (2, 3, 4),
    ragged: bool = True,
    seed: int = 0,
    only: Sequence[str] = (),
    limit: float = LIMIT,
) -> Report:
    """Return the findings about `target`, a training step or "package.module:name".

    ranks: the numbers of ranks to compare with one. ragged: whether it takes lengths that they do not divide. limit:
    seconds for each run on processes; a step over ringlab's Comm runs on virtual ranks in this process, without a limit.
    Raises: BackendError for an unknown check, a target that is not a function of tokens, or invalid ranks.

    >>> from ringlab.conformance.stepping import check_step
    >>> from ringlab.plain_step import step
    >>> check_step(step, only=["loss", "gradients"], ranks=[2]).failed
    []
    """
    if not ranks or min(ranks) < 2:
        raise BackendError("numbers of ranks of at least 2, to compare with one", repr(tuple(ranks)))
    calls = StepCalls(target, result, seed, limit)
    calls.has_one_of(TOKENS)
    lacks = {check.name: _lacks(check, parameters(calls.function), ragged) for check in CHECKS}
    return report(calls, CHECKS, only, tuple(ranks), lacks, "a training step")


def _lacks(check: Check[Case, Result], names: set[str], ragged: bool) -> str:
    """Why a check does not apply to a function with these parameters, or ""."""
    options = {**OPTIONS, "packed": PACKED, "labels": ("labels",), "cu_seqlens": ("cu_seqlens",)}
    for need in check.needs:
        if need == "ragged" and not ragged:
            return "no lengths are claimed that the ranks do not divide"
        if need != "ragged" and names.isdisjoint(options[need]):
            return f"it has no parameter {' or '.join(options[need])}"
    return ""
