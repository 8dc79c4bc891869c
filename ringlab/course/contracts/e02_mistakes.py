"""Exercise 02: plain implementations of merge, update and stream, and the common mistakes made with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ringlab.course.contract import Misconception

Pair = tuple[Tensor, Tensor]
State = tuple[Tensor, Tensor, Tensor]
Merge = Callable[[Tensor, Tensor], Pair]


def update(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    """Return the state (m, Σ e^(s − m), Σ e^(s − m) v) after one more block of keys."""
    new = torch.maximum(maximum, scores.amax(-1))
    anchor = torch.where(new == -math.inf, 0.0, new)
    factor, powers = torch.exp(maximum - anchor), torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values


def stream(q: Tensor, k: Tensor, v: Tensor, block: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Return (out, lse) by `update` over blocks of keys, everything in `dtype`."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    state = (
        torch.full(q.shape[:1], -math.inf, dtype=dtype),
        torch.zeros(q.shape[:1], dtype=dtype),
        torch.zeros_like(q),
    )
    for start in range(0, len(k), block):
        keys = slice(start, start + block)
        state = update(*state, q @ k[keys].T * q.shape[-1] ** -0.5, v[keys])
    maximum, total, acc = state
    return acc / total[:, None], maximum + total.log()


def _weighted(outs: Tensor, weights: Tensor) -> Tensor:
    return (outs * weights[..., None]).sum(0)


def _average(outs: Tensor, lses: Tensor) -> Pair:
    return outs.mean(0), lses.logsumexp(0)


def _add(outs: Tensor, lses: Tensor) -> Pair:
    return outs.sum(0), lses.logsumexp(0)


def _swapped(outs: Tensor, lses: Tensor) -> Pair:
    return _empty_twice(outs.flip(0), lses)[0], lses.logsumexp(0)


def _winner(outs: Tensor, lses: Tensor) -> Pair:
    lse, part = lses.max(0)
    return outs.gather(0, part[None, ..., None].expand(1, *outs.shape[1:]))[0], lse


def _maximum_for_lse(outs: Tensor, lses: Tensor) -> Pair:
    return _empty_twice(outs, lses)[0], lses.amax(0)


def no_last_axis(outs: Tensor, lses: Tensor) -> Pair:
    """Return the merge with weights that broadcast wrongly. Raises: ValueError when they do not broadcast at all."""
    lse = lses.logsumexp(0)
    try:
        return (outs * torch.exp(lses - lse)).sum(0), lse
    except RuntimeError as error:
        raise ValueError("these sizes do not broadcast: nobody gets an answer this way") from error


def _unprotected(outs: Tensor, lses: Tensor) -> Pair:
    masses = torch.exp(lses)
    return _weighted(outs, masses / masses.sum(0)), masses.sum(0).log()


def _empty_twice(outs: Tensor, lses: Tensor) -> Pair:
    lse = lses.logsumexp(0)
    return _weighted(outs, torch.exp(lses - lse)), lse


def _pair_by_pair(merge: Callable[[Tensor, Tensor, Tensor, Tensor], Pair]) -> Merge:
    """Return the merge of many parts that takes them one after the other with a merge of two."""

    def imitate(outs: Tensor, lses: Tensor) -> Pair:
        out, lse = outs[0], lses[0]
        for part in zip(outs[1:], lses[1:], strict=True):
            out, lse = merge(out, lse, *part)
        return out, lse

    return imitate


def _log_of_one_plus(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    lse = lse_a + torch.log(1 + torch.exp(lse_b - lse_a))
    return out_a * torch.exp(lse_a - lse)[..., None] + out_b * torch.exp(lse_b - lse)[..., None], lse


def _sigmoid(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Pair:
    out = out_a - torch.sigmoid(lse_b - lse_a)[..., None] * (out_a - out_b)
    return out, lse_a - torch.nn.functional.logsigmoid(lse_a - lse_b)


def _no_rescale(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = _block(maximum, scores, values)
    return new, total + fresh, acc + mass


def _shared_maximum(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new = torch.maximum(maximum, scores.max())
    factor, powers = torch.exp(maximum - new), torch.exp(scores - new[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values


def _only_total(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = _block(maximum, scores, values)
    return new, total * torch.exp(maximum - new) + fresh, acc + mass


def _upside_down(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = _block(maximum, scores, values)
    factor = torch.where(maximum == -math.inf, 0.0, torch.exp(new - maximum))
    return new, total * factor + fresh, acc * factor[:, None] + mass


def _block_maximum(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = _block(torch.full_like(maximum, -math.inf), scores, values)
    factor = torch.exp(maximum - new)
    return new, total * factor + fresh, acc * factor[:, None] + mass


def _own_maximum(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, _, _ = update(maximum, total, acc, scores, values)
    _, fresh, mass = _block(torch.full_like(maximum, -math.inf), scores, values)
    factor = torch.exp(maximum - new)
    return new, total * factor + fresh, acc * factor[:, None] + mass


def _normalised(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = update(maximum, total, acc, scores, values)
    return new, fresh, mass / fresh[:, None]


def _masked_nan(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = _block(maximum, scores, values)
    factor = torch.exp(maximum - new)
    return new, total * factor + fresh, acc * factor[:, None] + mass


def _block(maximum: Tensor, scores: Tensor, values: Tensor) -> State:
    new = torch.maximum(maximum, scores.amax(-1))
    powers = torch.exp(scores - new[:, None])
    return new, powers.sum(-1), powers @ values


def _blocks(q: Tensor, k: Tensor, v: Tensor, block: int, merge: Merge) -> Pair:
    parts = [stream(q, k[i : i + block], v[i : i + block], block) for i in range(0, len(k), block)]
    return merge(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))


def _mean_of_blocks(q: Tensor, k: Tensor, v: Tensor, block: int) -> Pair:
    parts = [stream(q, k[i : i + block], v[i : i + block], block)[0] for i in range(0, len(k), block)]
    return torch.stack(parts).mean(0), stream(q, k, v, block)[1]


def _undivided(q: Tensor, k: Tensor, v: Tensor, block: int) -> Pair:
    out, lse = stream(q, k, v, block)
    scores = q.float() @ k.float().T * q.shape[-1] ** -0.5
    return out * torch.exp(lse - scores.amax(-1))[:, None], lse


def _dropped(q: Tensor, k: Tensor, v: Tensor, block: int) -> Pair:
    whole = len(k) // block * block
    return stream(q, k[:whole], v[:whole], block)


EMPTY = (
    "the merge of parts that have all seen no key is NaN: -inf - (-inf) has no value. It is (0, -inf) again."
)

MERGE = (
    Misconception(
        "averages",
        "You average the partial outputs. A part whose keys score higher holds more of the softmax's "
        "mass: its weight is e^(its lse - the common lse), not one N-th.",
        _average,
    ),
    Misconception(
        "adds",
        "You add the partial outputs. Each is already divided by its own sum; give each the weight "
        "e^(its lse - the common lse) first.",
        _add,
    ),
    Misconception(
        "weights_swapped",
        "Each output got the weight of another part: outs[i] belongs to e^(lses[i] - lse).",
        _swapped,
    ),
    Misconception(
        "winner_takes_all",
        "You keep only the part with the largest lse. The other parts' keys have weight too; "
        "this is a maximum, not a softmax.",
        _winner,
    ),
    Misconception(
        "lse_is_the_maximum",
        "out is right, but your lse is only the largest of the parts'. The sums of exponentials "
        "add up, so the common lse is larger than any of them.",
        _maximum_for_lse,
    ),
    Misconception(
        "no_last_axis",
        "A weight must multiply all D numbers of its row, but yours lacks the last axis and was laid along another "
        "one: weights[..., None] has the shape (N, …, 1).",
        no_last_axis,
    ),
    Misconception("empty_twice", "Right, except for one case: " + EMPTY, _empty_twice),
    Misconception(
        "exp_of_lse",
        "You take exp of lse itself: it overflows above 88 in float32, and vanishes below -104. "
        "Use differences of lse only, and torch.logsumexp.",
        _unprotected,
    ),
    Misconception(
        "log_of_one_plus_exp",
        "log(1 + exp(x)) overflows for large x, and where lse_a is -inf the difference "
        "is inf: use torch.logsumexp (or torch.logaddexp).",
        _pair_by_pair(_log_of_one_plus),
    ),
    Misconception(
        "sigmoid_form",
        "The sigmoid form saves an exp, but " + EMPTY + " And its lse is NaN as soon as one side is empty.",
        _pair_by_pair(_sigmoid),
    ),
    Misconception(
        "state_in_bf16",
        "The merged state must not be narrower than float32: bfloat16 keeps 8 bits, and every "
        "merge would round again, so that the error grows with the number of blocks.",
    ),
    Misconception(
        "state_forced_to_float32",
        "Your state is float32 for float64 inputs too. float64 must stay float64: "
        "float32 is the least, not the most.",
    ),
)

UPDATE = (
    Misconception(
        "nothing_seen_is_nan",
        "A row that has seen no key yet came out as NaN: there m_old and m_new are both "
        "-inf. Measure against 0 as long as the maximum is -inf.",
        _masked_nan,
    ),
    Misconception(
        "rows_share_a_maximum",
        "You take one maximum for all rows. Every query row has its own (dim=-1).",
        _shared_maximum,
    ),
    Misconception(
        "never_rescales",
        "The maximum moved, but your old total and acc are still measured against the old one: "
        "multiply both by e^(m_old - m_new).",
        _no_rescale,
    ),
    Misconception(
        "acc_not_rescaled",
        "You rescale the total but not acc: both are sums of e^(s - m) and both move with m.",
        _only_total,
    ),
    Misconception(
        "rescales_upside_down",
        "Your factor is e^(m_new - m_old). The new maximum is the larger one, so what is "
        "old shrinks: e^(m_old - m_new).",
        _upside_down,
    ),
    Misconception(
        "maximum_of_the_block",
        "Your new maximum is the block's own. If an earlier block had a larger one, old "
        "terms grow without bound: keep the larger of the two.",
        _block_maximum,
    ),
    Misconception(
        "block_against_its_own",
        "The new block's terms are measured against the block's own maximum, the old ones against the common one. "
        "Both need e^(s - m_new).",
        _own_maximum,
    ),
    Misconception(
        "normalises_acc",
        "Your acc is divided by the total in every step, but the next step treats it as a plain "
        "sum: the factor of the old total is lost. Divide once, at the end.",
        _normalised,
    ),
)

STREAM = (
    Misconception(
        "mean_of_blocks",
        "You average the blocks' outputs. Blocks do not weigh the same: carry the maximum and "
        "the sum (or lse) along, and weigh by them.",
        _mean_of_blocks,
    ),
    Misconception(
        "never_divides",
        "Your out is still acc, the undivided sum: after the last block it must be divided by total.",
        _undivided,
    ),
    Misconception(
        "drops_the_last_block",
        "The last keys are missing: S need not be a multiple of the block, and the last "
        "block may be shorter.",
        _dropped,
    ),
    Misconception(
        "no_scale",
        "The scores are not divided by √D.",
        lambda q, k, v, block: stream(q * q.shape[-1] ** 0.5, k, v, block),
    ),
    Misconception(
        "scores_not_stable",
        "exp overflows for large scores: every block must be measured against a maximum.",
        lambda q, k, v, block: _blocks(q, k, v, block, _unprotected),
    ),
    Misconception(
        "streams_in_bf16",
        "Somewhere the state or the scores are rounded to bfloat16. Convert q, k and v to "
        "float32 first and keep all that is carried from block to block there.",
    ),
    Misconception(
        "whole_row_at_once",
        "Your function holds all S scores of a row at once. That is the wall that streaming "
        "removes: hold the scores of one block.",
    ),
)
