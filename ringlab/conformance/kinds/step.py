"""Checks of a whole training step: P ranks must give the loss and all gradients that one rank gives.

Most faults of training over several ranks are around the ring: in labels, positions, counts of tokens, or
sums of gradients. There is no oracle for the model, but the step on one rank gives the reference, and some
laws hold for every model: the loss of a batch is the mean over its labels, no label sees a later token, and
documents that are packed into one sequence do not see each other.

The function is called by name, with each of these arguments for which it has a parameter:

    ring comm group rank world_size   as for a ring (see `ringlab.conformance.target.claims`)
    tokens                            or input_ids: (B, S) int64 below 32, larger in `large ids`; the whole batch on every rank
    labels                            (B, S): label i is token i, or −100 to ignore it; token i − 1 predicts it
    cu_seqlens                        or position_ids, segment_ids, document_ids: packed documents. With B > 1 there is no cu_seqlens.
                                      If one of these is required, each sequence of a batch is a document of one packed sequence
    micro_batches replicas            or other names, see `OPTIONS`: the number of parts of the sequences
    recompute evaluate                or other names: flags to recompute activations, and to skip gradients
    attention_mask                    (B, S) int64: 0 for the padding of sequences of different lengths
    steps                             or other names: the number of steps with this batch, including those before a
                                      checkpoint; the results are those of the last step
    checkpoint                        or other names: a folder; the function continues from its checkpoint, if it has
                                      one, and saves a checkpoint into it after the last step

It returns the loss, or (loss, gradients), where the gradients are a mapping, a sequence or the model that
holds them, or (loss, gradients, metrics), where metrics are numbers of the batch by name. Every rank returns the whole
loss, gradients and metrics. The function makes its own model, with the same
weights at each call, in float32 or float64, without dropout.

Two gradients are equal if they differ by at most √ε of the largest value of the same gradient (half the
digits of its dtype) plus 64 ε of the largest of all gradients (for gradients that are 0 except for rounding).
Two losses are equal if their relative difference is at most 64 ε. Rounding errors are far below this, because
a loss is the mean of some hundred numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ringlab.conformance.kinds.calls import (
    NOT_ASKED,
    CallCheck,
    Calls,
    changed_inputs,
    distance,
    itself,
    lacks,
    made,
    numbers_of_ranks,
    report,
)
from ringlab.conformance.kinds.step_cases import (
    BY_TOKEN,
    GIVEN,
    IDS_OF_A_ROW,
    LABELS,
    LENGTH,
    MASK,
    OPTIONS,
    PACKED,
    PADDING,
    SEQUENCES,
    VOCABULARY,
    Case,
    Result,
    length,
    names,
    result,
)
from ringlab.conformance.pairwise_cases import Axes, covering_pairs
from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.run import Trouble
from ringlab.conformance.suite import LIMIT
from ringlab.errors import BackendError, apart
from ringlab.temporary import TemporaryFolder

StepCalls: TypeAlias = Calls[Case, Result]
ALONE = "on one rank"


def _with_plain(case: Case) -> list[Case]:
    return [case.plain, case]


def _equal(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(case.plain, case)
    return _differ(true, found, case)


def _loss(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(case.plain, case)
    return _loss_differs(true, found, case)


def _gradients(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(case.plain, case)
    if not true.returned and not any(each.returned for each in found):
        return f"{NOT_ASKED}it returns no gradients"
    return _gradients_differ(true, found, case)


def _twice(case: Case) -> list[Case]:
    return [case, replace(case, again=True)]


def _repeated(calls: StepCalls, case: Case) -> str:
    (true, *_), again = calls.of(*_twice(case))
    return _differ(true, again, case, "in the call before")


def _differ(true: Result, ranks: list[Result], case: Case, reference: str = ALONE) -> str:
    return _loss_differs(true, ranks, case, reference) or _gradients_differ(true, ranks, case, reference)


def _loss_differs(true: Result, ranks: list[Result], case: Case, reference: str = ALONE) -> str:
    losses = [each.loss for each in ranks]
    for rank, loss in enumerate(losses):
        if not abs(loss - true.loss) <= true.room:
            cause = _factor(losses, true, rank)
            got, right = apart(loss, true.loss, digits=8)
            off = _off(abs(loss - true.loss), true.room)
            return f"the loss on rank {rank} is {got}, and {right} {reference}{cause}{off} ({case})"
    return ""


def _gradients_differ(true: Result, ranks: list[Result], case: Case, reference: str = ALONE) -> str:
    """Return a sentence on the first gradient that differs, or "".

    A gradient that is missing on one side counts as 0, because an optimizer treats it so.
    """
    largest = max((np.abs(x).max(initial=0.0) for x in true.gradients.values()), default=0.0)
    for rank, each in enumerate(ranks):
        for name in true.gradients | each.gradients:
            right, found = true.gradients.get(name), each.gradients.get(name)
            right = np.zeros_like(found) if right is None else right
            found = np.zeros_like(right) if found is None else found
            if found.shape != right.shape:
                return f"the gradient of {name} on rank {rank} is {found.shape} for {right.shape} ({case})"
            errors = distance(found, right)
            allowed = math.sqrt(true.epsilon) * np.abs(right).max(initial=0.0) + 64 * true.epsilon * largest
            if errors.max(initial=0.0) > allowed:
                at = np.unravel_index(int(errors.argmax()), errors.shape)
                place = f"{name}[{', '.join(map(str, at))}]" if at else name
                cause = (
                    _times(float((found * right).sum() / (right * right).sum()), len(ranks))
                    if right.any()
                    else ""
                )
                got, wanted = apart(found[at], right[at])
                values = f"{got}, and {wanted} {reference}{cause}{_off(errors[at], allowed)}"
                return f"the gradient of {place} on rank {rank} is {values} ({case})"
    return ""


def _off(distance: float, allowed: float) -> str:
    return f"; {distance:.2g} apart, {allowed:.2g} is allowed" if math.isfinite(distance) else ""


def _factor(losses: list[float], true: Result, rank: int) -> str:
    """Return a likely cause of a wrong loss in words, or ""."""
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


def _agree(calls: StepCalls, case: Case) -> str:
    """Return a sentence if ranks return different bits, or "".

    If the ranks do not all make the same step, their copies of the weights drift apart.
    """
    (ranks,) = calls.of(case)
    for rank, each in enumerate(ranks[1:], start=1):
        if each.loss != ranks[0].loss:
            return f"the loss on rank {rank} has other bits than on rank 0 ({case})"
        for name, x in each.gradients.items():
            if not np.array_equal(x, ranks[0].gradients.get(name, x), equal_nan=True):
                return f"the gradient of {name} on rank {rank} has other bits than on rank 0 ({case})"
    return ""


def _moves(calls: StepCalls, case: Case, token: int) -> bool:
    """Return whether another value of `token` changes the loss of a case."""
    (before, *_), (after, *_) = calls.of(case, replace(case, changed=token))
    return abs(before.loss - after.loss) > before.room


def _one_by_one(case: Case) -> list[Case]:
    return [
        replace(case, labels=(place,)) for place in case.labels if isinstance(place, int) and place % case.S
    ]


def _metrics(calls: StepCalls, case: Case) -> str:
    (true, *_), ranks = calls.of(case.plain, case)
    if not true.metrics and not any(each.metrics for each in ranks):
        return f"{NOT_ASKED}it returns no metrics"
    for rank, each in enumerate(ranks):
        for name in true.metrics | each.metrics:
            found, right = each.metrics.get(name, math.nan), true.metrics.get(name, math.nan)
            if not abs(found - right) <= true.room_of(right):
                got, wanted = apart(found, right, digits=8)
                return f"{name} on rank {rank} is {got}, and {wanted} {ALONE} ({case})"
    return ""


def _mean(calls: StepCalls, case: Case) -> str:
    """Return a sentence if the result is not the mean over the labels, or "".

    The first label of a sequence does not count, because no position predicts it.
    """
    alone = _one_by_one(case)
    *parts, found = calls.of(*alone, case)
    rows = [_label(each) // case.S for each in alone]
    weights = {name: LOSSES[name](rows) for name in LOSSES}
    true = _mixed([*zip(weights[case.loss], [part[0] for part in parts], strict=True)])
    wrong = _differ(true, found, case, f"as {WORDS[case.loss]}, each label alone")
    forms = {f"{WORDS[name]} (--loss {name})": each for name, each in weights.items() if name != case.loss}
    forms[
        "the sum over sequences of their own means, divided by a constant, such as the number of all sequences, with labels or not"
    ] = [1 / rows.count(row) for row in rows]
    forms["the sum over labels, divided by a constant"] = [1.0] * len(rows)
    return _with_law(wrong, found, [part[0] for part in parts], forms, case)


LOSSES: dict[str, Callable[[list[int]], list[float]]] = {
    "tokens": lambda rows: [1 / len(rows)] * len(rows),
    "sequences": lambda rows: [1 / rows.count(row) / len({*rows}) for row in rows],
    "sums": lambda rows: [1 / len({*rows})] * len(rows),
}
"""The weight of each label in a loss, where `rows` has the sequence of each label. A document is a sequence."""
WORDS = {
    "tokens": "the mean over all labels",
    "sequences": "the mean over sequences of their own means, as objectives such as GRPO and DPO want it",
    "sums": "the mean over sequences of their own sums",
}


def _with_law(
    wrong: str, found: list[Result], parts: list[Result], forms: Mapping[str, Sequence[float]], case: Case
) -> str:
    """Return the sentence on a wrong mean, with the law that it breaks; "" if nothing is wrong.

    forms: other means in words, each with its weights for `parts`. If the result is one of them, the
    sentence says so.
    """
    if not wrong:
        return ""
    law = f"the law is for a loss that is {WORDS[case.loss]}"
    for words, weights in forms.items():
        if not _loss_differs(_mixed([*zip(weights, parts, strict=True)]), found, case):
            return f"{wrong}; {law}, and this one is {words}"
    return f"{wrong}; {law}"


def _mixed(shares: Sequence[tuple[float, Result]]) -> Result:
    """Return the weighted sum of the results."""
    first = shares[0][1]
    gradients = {
        name: np.sum([share * part.gradients.get(name, np.zeros_like(x)) for share, part in shares], axis=0)
        for name, x in first.gradients.items()
    }
    return replace(first, loss=sum(share * part.loss for share, part in shares), gradients=gradients)


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
    """Return cases of each document or sequence that has a label, or of `group` of them at a time."""
    lengths = case.documents or case.lengths
    begins = range(0, len(lengths), case.group)
    return [replace(case.plain, alone=d) for d in begins if max(lengths[d : d + case.group]) > 1]


def _with_each_alone(case: Case) -> list[Case]:
    return [*_each_alone(case), case]


def _alone(calls: StepCalls, case: Case) -> str:
    """Return a sentence if the result is not the mean over documents, or padded sequences, each alone; else ""."""
    *parts, found = calls.of(*_with_each_alone(case))
    lengths = case.documents or case.lengths
    groups = [lengths[d : d + case.group] for d in range(0, len(lengths), case.group)]
    labels = [[tokens - 1 for tokens in group if tokens > 1] for group in groups]
    labels = [each for each in labels if each]
    by_tokens = [sum(each) / sum(map(sum, labels)) for each in labels]
    by_sequences = [len(each) / sum(map(len, labels)) for each in labels]
    weights = by_tokens if case.loss == "tokens" else by_sequences
    true = _mixed([*zip(weights, [part[0] for part in parts], strict=True)])
    what = "documents" if case.documents else "sequences"
    wrong = _differ(true, found, case, f"as the mean over the {what}, each alone")
    forms = {
        f"{WORDS['tokens']} (--loss tokens)": by_tokens,
        "the mean over sequences of their own means (--loss sequences) or sums (--loss sums)": by_sequences,
    }
    forms = {words: each for words, each in forms.items() if each != weights}
    return _with_law(wrong, found, [part[0] for part in parts], forms, case)


def _padding_moves(calls: StepCalls, case: Case) -> str:
    """Return a sentence if the loss or gradients of a padded batch depend on its padding or on the ranks."""
    (true, *_), (moved, *_), found = calls.of(*_with_other_padding(case))
    if abs(true.loss - moved.loss) > true.room:
        return f"the tokens of the padding move the loss ({case.plain})"
    return _differ(true, found, case)


def _with_other_padding(case: Case) -> list[Case]:
    return [case.plain, replace(case.plain, changed=PADDING), case]


def _counts(calls: StepCalls, case: Case) -> str:
    """Return a sentence if labels of one token give no loss, or ""."""
    (found, *_) = calls.of(case)[0]
    if math.isfinite(found.loss) and found.loss > 0.0:
        return ""
    return f"the loss is {found.loss:g} if all labels are token {case.only}, which is a token like any other ({case})"


def _with_training(case: Case) -> list[Case]:
    return [replace(case.plain, evaluate=False), case]


def _evaluated(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(*_with_training(case))
    return _loss_differs(true, found, case, "in training on one rank")


def _together(calls: StepCalls, case: Case) -> str:
    return _evaluated(calls, case) if case.evaluate else _equal(calls, case)


def _with_its_plain(case: Case) -> list[Case]:
    return _with_training(case) if case.evaluate else _with_plain(case)


def _vocabulary(calls: StepCalls) -> int:
    """Return how many token ids one rank takes without an error, at most `_MOST_IDS`."""

    def takes(token: int) -> bool:
        case = Case(1, B=1, only=token)
        calls.make([case])
        return not isinstance(calls.done[case], Trouble)

    if takes(_MOST_IDS - 1):
        return _MOST_IDS
    least, most = VOCABULARY, _MOST_IDS - 1  # `least` ids are taken, and id `most` is not
    while most - least > 0:
        middle = (least + most) // 2
        least, most = (middle + 1, most) if takes(middle) else (least, middle)
    return least


_MOST_IDS, _MANY_IDS = 2**17, 512
"""The number of token ids up to which a vocabulary is searched, and up to which all of its ids are tested."""


def _every_id(calls: StepCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return cases that have each id several times on all ranks; of a large vocabulary, its first ids and its last."""
    count, rows = _vocabulary(calls), 2 * SEQUENCES
    some = rows * IDS_OF_A_ROW
    last = range(max(some, count - _MANY_IDS + some), count, some)
    parts = [(begin, min(begin + some, count)) for begin in (0, *last)]
    few = dict.fromkeys((ranks[0], ranks[-1]))
    sizes: dict[str, Any] = {"B": rows, "repeated": True}
    return [Case(P, length(P, 96), lowest=a, ids=b, **sizes) for P in few for a, b in parts]


def _met(calls: StepCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return cases for `metrics`; one has so many labels that a model without training predicts some of them."""
    usual = [_case(P, labels=which) for P in ranks for which in ("all", "late")]
    calls.make([usual[0].plain])
    first = calls.done[usual[0].plain]
    if isinstance(first, Trouble) or not first[0].metrics:
        return usual[:1]
    ids = min(_vocabulary(calls), _MANY_IDS)
    many = _case(ranks[0], S=length(ranks[0], max(LENGTH, 2 * ids)), labels="early", ids=ids)
    calls.make([many.plain])
    return usual if isinstance(calls.done[many.plain], Trouble) else [*usual, many]


def _pairs(ragged: bool) -> Callable[[StepCalls, tuple[int, ...]], list[Case]]:
    """Return a function that returns the table of pairs, with the options for which a step has parameters."""

    def cases(calls: StepCalls, ranks: tuple[int, ...]) -> list[Case]:
        def there(*values: Any, of: Sequence[str]) -> tuple[Any, ...]:
            return () if lacks((of,), calls.function) else values

        axes: Axes = {
            "P": (*ranks, 1),
            "B": (SEQUENCES, 1, 3, 7),
            "S": (LENGTH, 150, *((61,) if ragged else ())),
            "labels": ("all", *there("late", "early", of=LABELS)),
            "micro_batches": (1, *there(2, 3, 5, of=OPTIONS["micro_batches"])),
            "replicas": (1, *there(2, 3, of=OPTIONS["replicas"])),
            "recompute": (False, *there(True, of=OPTIONS["recompute"])),
            "evaluate": (False, *there(True, of=OPTIONS["evaluate"])),
            "packed": (False, *there(True, of=PACKED)),
            "memory": ("", "a part"),
        }
        return [_of_row(row) for row in covering_pairs(axes, partial(_fits, calls.function))]

    return cases


def _fits(function: Any, chosen: Mapping[str, Any]) -> bool:
    """Return whether these settings have a meaning together.

    Replicas must divide the ranks, and each part of each replica needs a sequence.
    """
    case = {"P": 0, "B": 0, "replicas": 1, "micro_batches": 1, "packed": False, "labels": "all", **chosen}
    P, B, replicas = case["P"], case["B"], case["replicas"]
    if (P and P % replicas) or (B and B < replicas * case["micro_batches"]):
        return False
    if case["labels"] == "late" and B == 1:
        return False  # no label would be left
    return not case["packed"] or B < 2 or not lacks((BY_TOKEN,), function)


def _of_row(row: Mapping[str, Any]) -> Case:
    """Return the case of a row of the table of pairs."""
    P, S, packed = row["P"], row["S"], row["packed"]
    S = S if S % 2 else length(P, S)
    documents = (S // 4 // (2 * P) * 2 * P, S - S // 4 // (2 * P) * 2 * P) * row["B"] if packed else ()
    others = {name: value for name, value in row.items() if name not in ("P", "S", "packed")}
    return Case(P, S, documents=documents, **others)


def _uninterrupted(case: Case) -> list[Case]:
    return [replace(case, resumed=False), case]


def _resumed(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(*_uninterrupted(case))
    return _differ(true, found, case, "without a checkpoint in between")


def _resumed_elsewhere(calls: StepCalls, case: Case) -> str:
    (true, *_), found = calls.of(*_without_a_break(case))
    return _differ(true, found, case, "without a checkpoint in between")


def _without_a_break(case: Case) -> list[Case]:
    return [replace(case, began=0), case]


def _on_other_ranks(calls: StepCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Make both parts of cases that continue from a checkpoint of another number of ranks, and return the cases."""
    few, many = min(ranks), max(ranks) if len({*ranks}) > 1 else 1
    S = length(math.lcm(few, many))
    cases = [Case(P, S, steps=3, began=began) for began, P in ((few, many), (many, few))]
    for case in cases:
        with TemporaryFolder(prefix="ringlab-check-") as folder:
            for part in (Case(case.began, S, checkpoint=folder), replace(case, checkpoint=folder)):
                if not isinstance(calls.done.get(case), Trouble):
                    calls.make([part])
                    calls.done[case] = calls.done.pop(part)
                    calls.seconds[case] = calls.seconds.get(case, 0.0) + calls.seconds.pop(part, 0.0)
    return cases


def _ids(calls: StepCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return cases of more token ids than 8 and 16 bits hold, without those that one rank refuses, but at least one."""
    cases = [_case(P, ids=2 * more, by=more) for more in (2**8, 2**16) for P in ranks]
    calls.make(case.plain for case in cases)
    return [case for case in cases if not isinstance(calls.done[case.plain], Trouble)] or cases[:1]


def _with_a_raised_token(case: Case) -> list[Case]:
    return [case.plain, replace(case.plain, changed=case.S // 2), case]


def _many_ids(calls: StepCalls, case: Case) -> str:
    """Return a sentence if ranks lose a part of a token's id, or if one rank does, or ""."""
    if isinstance(trouble := calls.done[case.plain], Trouble):
        return f"{NOT_ASKED}it takes no more than {VOCABULARY} token ids: {trouble}"
    (true, *_), (raised, *_), found = calls.of(*_with_a_raised_token(case))
    if abs(true.loss - raised.loss) <= true.room:
        return f"the loss is the same if a token's id is {case.by:,} larger: ids are cut, or out of the vocabulary without an error ({case.plain})"
    return _differ(true, found, case)


def _second_step(calls: StepCalls, case: Case) -> str:
    """Return a sentence if the loss after an update of the weights is not that of one rank, or "".

    Optimizers may divide by gradients that are 0 except for rounding, so half of the digits have to agree.
    """
    (true, *_), found = calls.of(case.plain, case)
    for rank, each in enumerate(found):
        if not abs(each.loss - true.loss) <= math.sqrt(true.epsilon) * max(abs(true.loss), 1e-3):
            got, right = apart(each.loss, true.loss, digits=8)
            return f"the loss on rank {rank} after an update is {got}, and {right} {ALONE} ({case})"
    return ""


def _other_documents(calls: StepCalls, case: Case) -> str:
    """Return a sentence if a token of another document changes the loss of a label, or "".

    This check needs no second implementation.
    """
    if _moves(calls, case, 0):
        return f"token 0, of document 0, moves the loss of label {_label(case)}, of document 1 ({case})"
    own = _label(case) - 1
    return (
        "" if _moves(calls, case, own) else f"token {own} does not move the loss of label {own + 1} ({case})"
    )


def _two_tokens(case: Case) -> list[Case]:
    return [case, replace(case, changed=0), replace(case, changed=_label(case) - 1)]


def _case(P: int, **changes: Any) -> Case:
    return replace(Case(P, length(P)), **changes)


def _on(ranks: Sequence[int], **changes: Any) -> list[Case]:
    return [_case(P, **changes) for P in ranks]


def _around_ends(P: int) -> list[Case]:
    """Return cases of one label each, around every place where a layout may cut the sequence.

    The layouts are contiguous and zig-zag. The first and the last label are included.
    """
    S = length(P)
    cuts = range(S // (2 * P), S, S // (2 * P))
    return [
        _case(P, labels=(j,))
        for j in sorted({1, S - 1, *(cut + d for cut in cuts for d in (-1, 0, 1))} - {0, S})
    ]


def _middle(P: int) -> list[Case]:
    return [_case(P, labels=(j,)) for j in (1, length(P) // 2, length(P) // 2 + 1)]


def _few(P: int) -> Case:
    """Return a case with one label of the first sequence, two of the second, and an ignored first label."""
    S = length(P)
    return _case(P, labels=(0, 5, S + 7, S + 40))


def _docs(P: int, *lengths: int, **changes: Any) -> Case:
    return replace(Case(P, sum(lengths), 1, documents=lengths), **changes)


def _even(P: int, **changes: Any) -> Case:
    return _docs(P, length(P, 24), length(P, 24), **changes)


def _empty(P: int) -> list[Case]:
    some = length(P, 24)
    return [_docs(P, some, some, 0, 0), _docs(P, some, 0, some)]


def _padded(P: int, **changes: Any) -> Case:
    S = length(P)
    return _case(P, lengths=(30, S, 8, 42), **changes)


def _batch_of_nine(P: int) -> Case:
    S = length(P)
    return _case(P, B=9, lengths=(30, S, 8, 42, 8, S - 1, 2, S, 17))


def _long(ranks: tuple[int, ...]) -> list[Case]:
    """Return cases that are longer than chunks of a loss, and than contexts of 2,048 and 4,096 tokens.

    Beyond its trained context a model may turn queries by other angles, which all ranks have to choose together.
    """
    P = ranks[0]
    return [Case(P, 600 * P, 1), *(Case(P, length(P, least), 1) for least in (2100, 4200))]


def _large(ranks: tuple[int, ...]) -> list[Case]:
    """Return cases of 70 sequences and 8,400 tokens, which are compared with ten sequences at a time."""
    return [
        Case(P, S, 70, lengths=(S,) * 70, group=10) for P in (1, ranks[0]) for S in (length(ranks[0], 120),)
    ]


def _many_documents(ranks: tuple[int, ...]) -> list[Case]:
    """Return cases of 300 documents in no order of length, which are compared with thirty at a time, and of long ones."""
    lengths = np.random.default_rng(0).integers(1, 7, 300).tolist()
    lengths[7] += length(ranks[0], sum(lengths)) - sum(lengths)
    few = 3, length(ranks[0], 1200) - 503, 500
    return [case for P in (1, ranks[0]) for case in (_docs(P, *lengths, group=30), _docs(P, *few))]


def _in_other_memory(calls: StepCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return cases of arguments that are parts of larger tensors; with documents too if the step takes them."""
    kinds = ("a part", "a layer", "dims apart")
    make = [_case] if lacks((PACKED,), calls.function) else [_case, _even]
    return [new(P, memory=memory) for new in make for P in (1, ranks[0]) for memory in kinds]


def _rows(P: int) -> Case:
    """Return a case of three sequences, each of which has other documents."""
    half = length(P, 24)
    return Case(P, 2 * half, 3, documents=(half, half, 2 * half, 2 * P, 2 * half - 2 * P))


ODD = ((7, 1, 30, 10), (20, 28), (13, 0, 8))
CHECKS: tuple[CallCheck[Case, Result], ...] = (
    CallCheck("repeatable", "the same loss and gradients in a second call", lambda ranks: [Case(1)], _twice, _repeated),
    CallCheck("loss", "the loss on P ranks, on each of them", lambda ranks: _on(ranks), _with_plain, _loss),
    CallCheck("gradients", "the gradients of all weights on P ranks, on each of them", lambda ranks: _on(ranks), _with_plain, _gradients),
    CallCheck("equal ranks", "the same bits on all ranks", lambda ranks: _on(ranks), itself, _agree),
    CallCheck("every label", "the loss of one label, around the ends of shards", lambda ranks: [case for P in ranks for case in _around_ends(P)], _with_plain, _loss, (LABELS,)),
    CallCheck("every token", "a batch of one token alone, for the first tokens and the last: each may be a label", lambda ranks: [Case(1, B=1, only=token) for token in (0, 1, 2, VOCABULARY - 1)], itself, _counts),
    CallCheck("long sequences", "600 tokens on a rank, 2,100 and 4,200 in all: more than a chunk of the loss, and a trained context, holds", lambda ranks: [], _with_plain, _equal, more=lambda calls, ranks: _long(ranks), large=True),
    CallCheck("large batches", "70 sequences of 120 tokens: the mean over all of them", lambda ranks: [], _with_each_alone, _alone, (LABELS,), more=lambda calls, ranks: _large(ranks), large=True),
    CallCheck("every id", "each id of the vocabulary many times on all ranks, or the first and the last ones of more than 512", lambda ranks: [], _with_plain, _equal, more=_every_id, large=True),
    CallCheck("strided", "arguments that are parts of larger tensors", lambda ranks: [], _with_plain, _equal, more=_in_other_memory),
    CallCheck("uneven labels", "labels that count on some ranks only", lambda ranks: _on(ranks, labels="late"), _with_plain, _equal, (LABELS,)),
    CallCheck("mean of labels", "loss and gradients are means over labels; first ones do not count", lambda ranks: [_few(P) for P in (1, *ranks)], lambda case: [*_one_by_one(case), case], _mean, (LABELS,)),
    CallCheck("metrics", "numbers that it reports, as on one rank", lambda ranks: [], _with_plain, _metrics, (LABELS,), more=_met),
    CallCheck("look-ahead", "a label's loss moves with the token before it, and with no later one", lambda ranks: [case for P in (1, *ranks) for case in _middle(P)], _around_the_label, _ahead, (LABELS,)),
    CallCheck("ragged", "lengths that the ranks do not divide", lambda ranks: [Case(P, S) for P in ranks for S in (26, 7)], _with_plain, _equal),
    CallCheck("padded batch", "padding behind shorter sequences: the mean over the sequences, each alone", lambda ranks: [*(_padded(P) for P in (1, *ranks)), *(_batch_of_nine(P) for P in (1, *ranks[:1]))], _with_each_alone, _alone, (LABELS,)),
    CallCheck("attention mask", "padding in front of shorter sequences, which moves nothing", lambda ranks: [_padded(P, left=True) for P in (1, *ranks)], _with_other_padding, _padding_moves, (LABELS, MASK)),
    CallCheck("large ids", "token ids of more than 8 and 16 bits: as on one rank, and each id counts; a smaller vocabulary is said", lambda ranks: [], _with_a_raised_token, _many_ids, more=_ids, large=True),
    CallCheck("second step", "the loss after an update of the weights; after two by gradients of one label, which are large", lambda ranks: [*_on(ranks, steps=2), *_on(ranks, steps=3, labels=(LENGTH // 2,))], _with_plain, _second_step, (OPTIONS["steps"],)),
    CallCheck("resumption", "a step after a checkpoint is that of a run without one", lambda ranks: _on((1, *ranks), steps=3, resumed=True), _uninterrupted, _resumed, (OPTIONS["steps"], OPTIONS["checkpoint"])),
    CallCheck("other ranks", "steps after a checkpoint of more ranks, and of fewer: as without one, or an error", lambda ranks: [], _without_a_break, _resumed_elsewhere, (OPTIONS["steps"], OPTIONS["checkpoint"]), more=_on_other_ranks),
    CallCheck("micro-batches", "gradients summed over parts with unequal numbers of labels", lambda ranks: [_case(P, labels="late", micro_batches=n) for P in (1, *ranks[:1]) for n in (2, 3, SEQUENCES)], _with_plain, _equal, (OPTIONS["micro_batches"], LABELS)),
    CallCheck("recomputation", "activations made again in backward", lambda ranks: _on((1, *ranks), recompute=True), _with_plain, _equal, (OPTIONS["recompute"],)),
    CallCheck("evaluation", "the loss of training, without gradients", lambda ranks: _on((1, *ranks), evaluate=True), _with_training, _evaluated, (OPTIONS["evaluate"],)),
    CallCheck("replicas", "sequences dealt to replicas, tokens to the ranks of each", lambda ranks: [_case(2 * n, labels=which, replicas=2) for n in (1, 2) for which in ("all", "late")], _with_plain, _equal, (OPTIONS["replicas"], LABELS)),
    CallCheck("replicas and parts", "micro-batches of replicas", lambda ranks: [_case(2 * n, labels="late", replicas=2, micro_batches=2) for n in (1, 2)], _with_plain, _equal, (OPTIONS["replicas"], OPTIONS["micro_batches"], LABELS)),
    CallCheck("recomputed parts", "activations made again for each micro-batch", lambda ranks: _on(ranks[:1], recompute=True, micro_batches=2), _with_plain, _equal, (OPTIONS["recompute"], OPTIONS["micro_batches"])),
    CallCheck("packed", "packed documents on P ranks", lambda ranks: [_even(P) for P in ranks], _with_plain, _equal, (PACKED,)),
    CallCheck("documents", "packed documents as each by itself", lambda ranks: [_even(P) for P in (1, *ranks)], _with_each_alone, _alone, (PACKED,)),
    CallCheck("odd documents", "lengths of documents that the ranks do not divide, one token, and none", lambda ranks: [_docs(P, *each) for P in (1, *ranks) for each in ODD], _with_each_alone, _alone, (PACKED,)),
    CallCheck("many documents", "300 documents in no order of length, and documents of 500 tokens and more", lambda ranks: [], _with_each_alone, _alone, (PACKED,), more=lambda calls, ranks: _many_documents(ranks), large=True),
    CallCheck("other documents", "a token of one document moves no label of another", lambda ranks: [_even(P, labels=(2 * length(P, 24) - 1,)) for P in (1, *ranks)], _two_tokens, _other_documents, (PACKED, LABELS)),
    CallCheck("empty documents", "boundaries that are repeated, at the end and within", lambda ranks: [case for P in (1, *ranks) for case in _empty(P)], _with_each_alone, _alone, (("cu_seqlens",),)),
    CallCheck("packed rows", "several sequences of packed documents, each with its own: each document by itself", lambda ranks: [_rows(P) for P in (1, *ranks)], _with_each_alone, _alone, (BY_TOKEN,)),
    CallCheck("recomputed documents", "packed documents, and activations made again", lambda ranks: [_even(P, recompute=True) for P in ranks[:1]], _with_plain, _equal, (OPTIONS["recompute"], PACKED)),
    CallCheck("evaluated documents", "packed documents in evaluation, as each by itself", lambda ranks: [_even(P, evaluate=True) for P in ranks[:1]], _with_each_alone, _alone, (OPTIONS["evaluate"], PACKED)),
    CallCheck("pairs", "every two settings together: ranks, sizes of a batch, labels, parts, replicas, recomputation, evaluation, documents", lambda ranks: [], _with_its_plain, _together, more=_pairs(True)),
    CallCheck("side effects", "tokens, labels, documents and torch's modes as they were, in every call", lambda ranks: [], itself, changed_inputs, more=made(lambda ranks: _on((1, *ranks)))),
)  # fmt: skip
"""The checks, in the order in which they are reported."""


def _with_loss(check: CallCheck[Case, Result], loss: str) -> CallCheck[Case, Result]:
    def with_loss(cases: list[Case]) -> list[Case]:
        return [replace(case, loss=loss) for case in cases]

    more = check.more and (lambda calls, ranks: with_loss(check.more(calls, ranks)))  # type: ignore[misc]
    return replace(check, cases=lambda ranks: with_loss(check.cases(ranks)), more=more)


def _may_be_refused(case: Case) -> bool:
    # A model may have a shorter context, and a checkpoint may consist of the shards of its ranks.
    return (
        case.began > 0
        or bool(case.lengths)
        or (case.B > 1 and bool(case.documents))
        or case.S * case.B > 10 * LENGTH
    )


def check_step(
    target: Any,
    *,
    ranks: Sequence[int] | None = None,
    quick: bool = False,
    ragged: bool = True,
    loss: str = "tokens",
    seed: int = 0,
    only: Sequence[str] = (),
    limit: float = LIMIT,
) -> Report:
    """Return the findings about `target`, a training step or "package.module:name".

    ranks: the numbers of ranks to compare with one rank; if None, 2, 3 and 4, or 2 and 3 with `quick`. quick:
    whether to leave out large calls. ragged: whether the step takes lengths that the ranks do not divide. loss:
    the kind of mean: "tokens", over labels; "sequences", over sequences of their own means; "sums", over
    sequences of their own sums. limit: seconds for each call on processes; a step over ringlab's Comm runs on
    virtual ranks in this process, without a limit.
    Raises: BackendError for an unknown check or loss, a target that is not a function of tokens, or invalid ranks.

    >>> from ringlab.conformance.kinds.step import check_step
    >>> from ringlab.plain_step import step
    >>> check_step(step, only=["loss", "gradients"], ranks=[2]).failed
    []
    """
    ranks = numbers_of_ranks(ranks, quick)
    if not ranks or min(ranks) < 2:
        raise BackendError("numbers of ranks of at least 2, to compare with one", repr(ranks))
    if loss not in LOSSES:
        raise BackendError(f"one of the losses {', '.join(LOSSES)}", repr(loss))
    calls = StepCalls(target, result, seed, limit, GIVEN, names, _may_be_refused, draws=True)
    uneven = ("ragged", "odd documents", "many documents")
    skip = {} if ragged else dict.fromkeys(uneven, "no such lengths are claimed")
    checks = [_with_loss(check, loss) for check in CHECKS]
    checks = [replace(each, more=_pairs(ragged)) if each.name == "pairs" else each for each in checks]
    return report(calls, checks, only, ranks, "a training step", skip, quick)
