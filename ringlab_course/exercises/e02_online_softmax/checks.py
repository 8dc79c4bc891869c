"""Exercise 02: the checks of merge, update and stream.

The right values come from the float64 oracle. A tolerance is twice the error of the plainest implementation
in the same dtype, but never below the rounding error of the largest score.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab.errors import apart
from ringlab_course.checking.answers import (
    bound_from,
    compare_with,
    expect_array,
    expect_tuple,
    relative_error,
)
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.growth import measured as grown
from ringlab_course.checking.numbers import EPS, fold, largest, rounding, roundings
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e02_online_softmax import plain

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

Pair = tuple[Any, Any]
NAMES = ("out", "lse")
STATE = ("maximum", "total", "acc")
mistake = mistakes_of("02")


def check_worked(subject: Subject, rng: np.random.Generator) -> None:
    """Check a merge of three parts, and the lesson's example, whose out is 24.205 under any shift."""
    shift = round(float(rng.uniform(-9, 9)), 2)
    scores, values = torch.tensor([[2.0, 1.0, 3.0]]) + shift, torch.tensor([[10.0], [20.0], [30.0]])
    example = (
        "scores [2, 1] with values [10, 20], merged with score [3] and value [30] (the lesson's example; all scores "
        f"shifted by {shift:g}: out stays, lse {'rises' if shift > 0 else 'falls'} by {abs(shift):g})"
    )
    cases = [
        _merge_case(subject, _parts(scores, values, (2,)), _truth(scores, values), example),
        _cut_case(subject, _normal(rng, 2, 4), _normal(rng, 4, 3), (1, 3)),
    ]
    compare_all(cases)


def check_cut(subject: Subject, rng: np.random.Generator) -> None:
    """Check that parts merge to the softmax of all keys, wherever and however often the keys are cut."""
    cuts = ((1, 3, (1,)), (2, 5, ()), (2, 5, (1, 3)), (4, 40, (3, 11, 30)))
    cases = (
        _cut_case(subject, _normal(rng, rows, keys), _normal(rng, keys, 4), at) for rows, keys, at in cuts
    )
    compare_all(cases)


def check_empty(subject: Subject, rng: np.random.Generator) -> None:
    """Check that parts without keys change nothing, and that a merge of no parts is empty."""
    for hidden, note in (
        (slice(2, 4), "b has seen no key"),
        (slice(0, 2), "a has seen no key"),
        (slice(0, 4), "neither has seen a key"),
    ):
        scores = _normal(rng, 2, 4)
        # The hidden part is empty in row 1 and has most of the weight in row 0. So an answer that drops the
        # whole part, because row 1 is empty, is clearly wrong in row 0.
        scores[0, hidden] += 5
        scores[1, hidden] = -math.inf
        _compare_cuts(subject, scores, _normal(rng, 4, 2), (2,), f"in row 1 {note}, ")
    rows, D = (int(n) for n in rng.integers(2, 100, 2))
    truth = torch.zeros(rows, D), torch.full((rows,), -math.inf)
    answer = expect_tuple(subject.call(torch.zeros(0, rows, D), torch.zeros(0, rows)), NAMES)
    compare_with(answer, truth, bound=0.0, names=NAMES, case=f"no part at all: N=0, {rows} rows, D={D}")


def check_large(subject: Subject, rng: np.random.Generator) -> None:
    """Check that an lse of ±1000 neither overflows nor vanishes."""
    for near_a, near_b in ((-1000.0, -1000.0), (1000.0, 1000.0), (0.0, 200.0), (200.0, 0.0)):
        scores = _normal(rng, 2, 4) + torch.tensor([near_a, near_a, near_b, near_b])
        _compare_cuts(subject, scores, _normal(rng, 4, 2), (2,), f"lse near {near_a:g} and {near_b:g}, ")


def check_state(subject: Subject, rng: np.random.Generator) -> None:
    """Check that the state is right and at least float32, or float64 for float64 inputs."""
    parts = _parts(_normal(rng, 2, 4), _normal(rng, 4, 2), (2,))
    for dtype, least, too_narrow in (
        (torch.bfloat16, torch.float32, "state_in_bf16"),
        (torch.float64, torch.float64, "state_forced_to_float32"),
    ):
        outs = torch.stack([out for out, _ in parts]).to(dtype)
        lses = torch.stack([lse for _, lse in parts]).to(least)
        answer = expect_tuple(subject.call(outs, lses), NAMES)
        for name, part, shape in zip(NAMES, answer, ((2, 2), (2,)), strict=True):
            expect_array(part, shape, name=name)
            if not _at_least(part, least):
                raise mistake(too_narrow).failure(f"inputs {dtype}, {name} came back as {part.dtype}")
        truth = fold(zip(outs.double().numpy(), lses.double().numpy(), strict=True))
        bound = rounding(truth, 4 * largest(lses))
        compare_with(answer, truth, bound=bound, names=NAMES, case=f"two parts of two rows, inputs {dtype}")


def check_order(subject: Subject, rng: np.random.Generator) -> None:
    """Check that three parts give the same merge in any grouping and order."""
    scores, values = _normal(rng, 2, 9), _normal(rng, 9, 3)
    truth, parts = _truth(scores, values), _parts(scores, values, (2, 7))
    left = _call(subject, _call(subject, parts[0], parts[1]), parts[2])
    right = _call(subject, parts[0], _call(subject, parts[1], parts[2]))
    turned = _call(subject, _call(subject, parts[2], parts[0]), parts[1])
    flat = _call(subject, parts[1], parts[2], parts[0])
    for answer, order in ((left, "(a·b)·c"), (right, "a·(b·c)"), (turned, "(c·a)·b"), (flat, "b·c·a")):
        compare_with(answer, truth, bound=rounding(truth), names=NAMES, case=f"merged as {order}")


def check_many(subject: Subject, rng: np.random.Generator) -> None:
    """Check merges of many parts, some of them without keys."""
    scores, values = _normal(rng, 5, 97) * 10, _normal(rng, 97, 8)
    scores[0] = -math.inf
    scores[1, :60] = -math.inf
    scores[2] -= 500
    _compare_cuts(subject, scores, values, (3, 4, 20, 50, 51, 80), "seven parts, some without keys, ")
    scores = _normal(rng, 4, 30) + torch.tensor([[-1000.0], [-600.0], [600.0], [1000.0]])
    _compare_cuts(subject, scores, _normal(rng, 30, 8), (4, 17), "lse from -1000 to 1000, ")


def check_first(subject: Subject, rng: np.random.Generator) -> None:
    """Check the state after the first block."""
    for rows, keys, shift in ((1, 2, 0), (3, 5, 0), (2, 3, -9)):
        note = "the first block, all scores below 0, " if shift else "the first block, "
        _compare_update(subject, _normal(rng, rows, keys) + shift, _normal(rng, keys, 2), (), note)


def check_rise(subject: Subject, rng: np.random.Generator) -> None:
    """Check that the old sums shrink when the maximum rises."""
    scores = _normal(rng, 2, 4) + torch.tensor([0.0, 0.0, 6.0, 6.0])
    _compare_update(subject, scores, _normal(rng, 4, 2), (2,), "the second block has the larger maximum, ")


def check_fall(subject: Subject, rng: np.random.Generator) -> None:
    """Check that the old sums stay unchanged when the maximum stays."""
    scores = _normal(rng, 2, 4) - torch.tensor([0.0, 0.0, 6.0, 6.0])
    _compare_update(subject, scores, _normal(rng, 4, 2), (2,), "the second block has the smaller maximum, ")


def check_hidden(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers on a row that sees no key of the first block."""
    scores = _normal(rng, 2, 4)
    scores[1, :2] = -math.inf
    _compare_update(subject, scores, _normal(rng, 4, 2), (2,), "row 1 sees no key of the first block, ")


def check_blocks(subject: Subject, rng: np.random.Generator) -> None:
    """Check the state over many blocks with large scores and hidden keys."""
    scores = _normal(rng, 6, 60) * 60
    scores[0], scores[1, 15:] = -math.inf, -math.inf
    _compare_update(
        subject, scores, _normal(rng, 60, 8), (10, 15, 35), "four blocks, large scores, hidden keys, "
    )


def check_stream_small(subject: Subject, rng: np.random.Generator) -> None:
    """Check out and lse for several sizes of block."""
    for L, S, D, block in ((1, 3, 4, 2), (2, 4, 5, 1), (4, 12, 8, 3)):
        _compare_stream(subject, rng, L, S, D, block)


def check_stream_ragged(subject: Subject, rng: np.random.Generator) -> None:
    """Check streams whose last block is shorter than the others."""
    for S, block in ((3, 2), (7, 4), (5, 8)):
        _compare_stream(subject, rng, 2, S, 4, block)


def check_stream_memory(subject: Subject, rng: np.random.Generator) -> None:
    """Check that memory besides q, k and v does not grow with the number of keys."""
    for L, D, block, dtype, sizes, held, numbers in (
        (256, 4, 256, torch.float32, (256, 1024, 4096), "whole_row_at_once", 256 * 4096),
        (2048, 4, 8, torch.float32, (128, 512, 2048), "grows_with_the_keys", 2048 // 8 * 2048 * 4),
        (4, 64, 512, torch.bfloat16, (2048, 8192, 32768), "converts_everything", 32768 * 64),
    ):

        def peak(S: int, L: int = L, D: int = D, block: int = block, dtype: torch.dtype = dtype) -> int:
            q, k, v = (_normal(rng, n, D).to(dtype) for n in (L, S, S))
            measured = subject.measure(q, k, v, block)
            _expect_stream(measured.answer, q, k, v, block)
            return measured.peak_bytes

        growth = grown(sizes, peak, 0, 4 * numbers)
        if growth.faster_than(0, 4 * numbers):
            one = L * block * 4 / 2**20
            example = f"{_dtype(dtype)} inputs, L={L}, D={D}, block={block}, one block of scores is {one:.2f} MiB; {growth}"
            raise mistake(held).failure(example)


def check_stream_bf16(subject: Subject, rng: np.random.Generator) -> None:
    """Check that bfloat16 inputs are streamed with a float32 state."""
    L, S, D, block = 8, 512, 32, 16
    q, k, v = (_normal(rng, n, D).bfloat16() for n in (L, S, S))
    case = f"bfloat16 q, k, v; L={L}, S={S}, D={D}, block={block}"
    answer, truth = expect_tuple(subject.call(q, k, v, block), NAMES), _attention_truth(q, k, v)
    for name, part, shape in zip(NAMES, answer, ((L, D), (L,)), strict=True):
        expect_array(part, shape, name=name)
        if not _at_least(part, torch.float32):
            raise mistake("streams_in_bf16").failure(f"{case}: {name} came back as {part.dtype}")
    error, bound = (
        relative_error(answer, truth),
        max(bound_from(plain.stream(q, k, v, block), truth), 2e-6),
    )
    if bound < error < 0.1:
        off, most = apart(error, bound, digits=1, kind="e")
        raise mistake("streams_in_bf16").failure(f"{case}\nrelative error {off}, allowed {most}")
    compare_with(
        answer,
        truth,
        bound=bound,
        names=NAMES,
        case=case,
    )


def check_stream_sharp(subject: Subject, rng: np.random.Generator) -> None:
    """Check a stream with large scores."""
    _compare_stream(subject, rng, 3, 8, 4, 3, gain=200)


def check_stream_any(subject: Subject, rng: np.random.Generator) -> None:
    """Check streams with other lengths and blocks."""
    for L, S, D, block in ((1, 1, 1, 1), (17, 97, 5, 10), (9, 130, 16, 64)):
        _compare_stream(subject, rng, L, S, D, block, gain=4)


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).float()


def _part(scores: Tensor, values: Tensor) -> Pair:
    """Return the true (out, lse) of some keys, rounded to the dtype of `values`."""
    out, lse = _truth(scores, values)
    return torch.from_numpy(out).to(values.dtype), torch.from_numpy(lse).to(values.dtype)


def _truth(scores: Tensor, values: Tensor) -> Pair:
    """Return the oracle's (out, lse) of the given scores, from attention whose keys are the unit vectors.

    Values are padded to the head dim of the unit vectors, and out is cut back to the head dim of the values.
    """
    visible, rows = torch.isfinite(scores), torch.where(torch.isfinite(scores), scores, 0.0)
    keys, D = scores.shape[-1], values.shape[-1]
    width = max(keys, D)
    q = torch.nn.functional.pad(rows, (0, width - keys))[None, None]
    v = torch.nn.functional.pad(values, (0, width - D))[None, None]
    out, lse = oracle.attention(q, torch.eye(keys, width)[None, None], v, mask=visible, scale=1.0)
    return out[0, 0, :, :D], lse[0, 0]


def _attention_truth(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    out, lse = oracle.attention(q[None, None], k[None, None], v[None, None])
    return out[0, 0], lse[0, 0]


def _parts(scores: Tensor, values: Tensor, cuts: tuple[int, ...]) -> list[Pair]:
    """Cut the keys before each position in `cuts`, and return the (out, lse) of the parts."""
    edges = (0, *cuts, len(values))
    return [_part(scores[:, a:b], values[a:b]) for a, b in itertools.pairwise(edges)]


def _cut_case(
    subject: Subject, scores: Tensor, values: Tensor, cuts: tuple[int, ...], note: str = ""
) -> Answered:
    cut = f"cut before key {', '.join(map(str, cuts))}" if cuts else "in one part"
    case = f"{note}{len(scores)} rows, {len(values)} keys {cut}"
    return _merge_case(subject, _parts(scores, values, cuts), _truth(scores, values), case)


def _compare_cuts(
    subject: Subject, scores: Tensor, values: Tensor, cuts: tuple[int, ...], note: str = ""
) -> None:
    case = _cut_case(subject, scores, values, cuts, note)
    compare_all([case])


def _merge_case(subject: Subject, parts: list[Pair], truth: Pair, case: str) -> Answered:
    """Return the learner's merge of all parts at once, and the truth."""
    inputs = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    answer = expect_tuple(subject.call(*inputs), NAMES)
    bound = roundings(
        truth, 4 * max(largest(lse) for _, lse in parts)
    )  # each weight is computed from lse with four roundings
    _expect_last_axis(answer, inputs, case)
    return Answered(answer, truth, bound, names=NAMES, text=case)


def _expect_last_axis(answer: Pair, inputs: Pair, case: str) -> None:
    """Raise the mistake "no_last_axis" if out has the shape that weights without a last axis give."""
    right, got = tuple(inputs[0].shape[1:]), tuple(getattr(answer[0], "shape", ()))
    try:
        wrong = torch.broadcast_shapes(inputs[0].shape, inputs[1].shape)[1:]
    except RuntimeError:  # with these sizes the mistake raises an error and gives no shape
        return
    if got == wrong != right:
        raise mistake("no_last_axis").failure(f"{case}: out has shape {got}, should be {right}")


def _call(subject: Subject, *parts: Pair) -> Pair:
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    out, lse = expect_tuple(subject.call(outs, lses), NAMES)
    return (
        torch.as_tensor(expect_array(out, outs.shape[1:], name="out")),
        torch.as_tensor(expect_array(lse, lses.shape[1:], name="lse")),
    )


def _compare_update(
    subject: Subject, scores: Tensor, values: Tensor, cuts: tuple[int, ...], note: str
) -> None:
    """Pass the learner's state through the blocks, and compare it after each block."""
    rows, D, edges = len(scores), values.shape[-1], (0, *cuts, len(values))
    state: Any = torch.full((rows,), -math.inf), torch.zeros(rows), torch.zeros(rows, D)
    for a, b in itertools.pairwise(edges):
        inputs = (*state, scores[:, a:b], values[a:b])
        state = expect_tuple(subject.call(*inputs), STATE)
        truth = _state_truth(scores[:, :b], values[:b])
        size = 2 * max(8, largest(scores))
        compare_with(
            state,
            truth,
            bound=(4 * EPS, rounding(truth[1], size), rounding(truth[2], size)),
            names=STATE,
            case=f"{note}{rows} rows, {b} keys seen",
        )


def _state_truth(scores: Tensor, values: Tensor) -> tuple[Any, Any, Any]:
    """Return the maximum m, Σ e^(s − m) and Σ e^(s − m) v in float64, from the oracle's out and lse."""
    out, lse = _truth(scores, values)
    maximum = scores.double().amax(-1).numpy()
    with np.errstate(invalid="ignore"):
        total = np.where(np.isfinite(lse), np.exp(lse - maximum), 0.0)
    return maximum, total, out * total[:, None]


def _compare_stream(
    subject: Subject, rng: np.random.Generator, L: int, S: int, D: int, block: int, *, gain: float = 1.0
) -> None:
    q, k, v = _normal(rng, L, D) * gain, _normal(rng, S, D), _normal(rng, S, D)
    _expect_stream(subject.call(q, k, v, block), q, k, v, block)


def _expect_stream(answer: Any, q: Tensor, k: Tensor, v: Tensor, block: int) -> None:
    truth, D = _attention_truth(q, k, v), q.shape[-1]
    size = 2 * float((q.float().abs() @ k.float().abs().T).max()) * D**-0.5
    # the state is rounded once for each block
    once_a_block = len(k) / block * torch.finfo(torch.float32).eps / 2
    # if an answer updates lse at every key with logaddexp, its errors add up like a random walk
    size = max(size, math.sqrt(len(k)) / 2 * largest(truth[1]))
    results, least = plain.stream(q, k, v, block), roundings(truth, size)
    bounds = [
        max(bound_from(*pair), low + once_a_block) for *pair, low in zip(results, truth, least, strict=True)
    ]
    compare_with(
        answer,
        truth,
        bound=bounds,
        names=NAMES,
        case=f"L={len(q)}, S={len(k)}, D={D}, block={block}",
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _at_least(part: Any, dtype: torch.dtype) -> bool:
    """Return whether the dtype of `part` (torch or NumPy) is at least as wide as `dtype`."""
    return part.dtype.itemsize >= dtype.itemsize
