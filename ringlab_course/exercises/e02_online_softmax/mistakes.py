"""Exercise 02: plain implementations of merge, update and stream, and the common mistakes made with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("02")

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


def _lses_added(outs: Tensor, lses: Tensor) -> Pair:
    return _empty_twice(outs, lses)[0], lses.sum(0)


def _over_queries(outs: Tensor, lses: Tensor) -> Pair:
    return _weighted(outs, lses.softmax(-1)), lses.logsumexp(0)


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


def _right(outs: Tensor, lses: Tensor) -> Pair:
    lse = lses.logsumexp(0)
    return _weighted(outs, torch.exp(lses - lse).masked_fill(lses == -math.inf, 0.0)), lse


def _part_dropped(outs: Tensor, lses: Tensor) -> Pair:
    kept = ~torch.isneginf(lses).flatten(1).any(1)
    if not kept.any():
        return torch.zeros_like(outs[0]), torch.full_like(lses[0], -math.inf)
    return _right(outs[kept], lses[kept])


def _first_two(outs: Tensor, lses: Tensor) -> Pair:
    return _right(outs[:2], lses[:2])


def _wrong_sign(outs: Tensor, lses: Tensor) -> Pair:
    lse = lses.logsumexp(0)
    return _weighted(outs, torch.exp(lse - lses)), lse


def _sigmoid_from_nothing(outs: Tensor, lses: Tensor) -> Pair:
    nothing = torch.zeros_like(outs[:1]), torch.full_like(lses[:1], -math.inf)
    return _pair_by_pair(_sigmoid)(torch.cat([nothing[0], outs]), torch.cat([nothing[1], lses]))


def _starts_at(number: float) -> Merge:
    """Return the merge whose first state has this lse in place of -inf."""

    def imitate(outs: Tensor, lses: Tensor) -> Pair:
        start = torch.zeros_like(outs[:1]), torch.full_like(lses[:1], number)
        return _empty_twice(torch.cat([start[0], outs]), torch.cat([start[1], lses]))

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


def _only_acc(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = _block(maximum, scores, values)
    return new, total + fresh, acc * torch.exp(maximum - new)[:, None] + mass


def _upside_down_from_nothing(
    maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> State:
    new, fresh, mass = _block(maximum, scores, values)
    factor = torch.exp(new - maximum)
    return new, total * factor + fresh, acc * factor[:, None] + mass


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


def _old_maximum(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    return maximum, *update(maximum, total, acc, scores, values)[1:]


def _never_below_zero(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    new, fresh, mass = _block(maximum.clamp(min=0), scores, values)
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


def _bare_lse(q: Tensor, k: Tensor, v: Tensor, block: int) -> Pair:
    out, lse = stream(q, k, v, block)
    return out, lse - (q.float() @ k.float().T * q.shape[-1] ** -0.5).amax(-1)


def _dropped(q: Tensor, k: Tensor, v: Tensor, block: int) -> Pair:
    whole = len(k) // block * block
    return stream(q, k[:whole], v[:whole], block)


MERGE = (
    mistake("averages", _average),
    mistake("adds", _add),
    mistake("weights_swapped", _swapped),
    mistake("part_dropped_for_one_row", _part_dropped),
    mistake("winner_takes_all", _winner),
    mistake("first_two_parts_only", _first_two),
    mistake("exponent_of_the_wrong_sign", _wrong_sign),
    mistake("lse_is_the_maximum", _maximum_for_lse),
    mistake("lses_added", _lses_added),
    mistake("softmax_over_queries", _over_queries),
    mistake("no_last_axis", no_last_axis),
    mistake("empty_twice", _empty_twice),
    mistake("exp_of_lse", _unprotected),
    mistake("log_of_one_plus_exp", _pair_by_pair(_log_of_one_plus)),
    mistake("sigmoid_form", _pair_by_pair(_sigmoid)),
    mistake("nan_from_nothing", _sigmoid_from_nothing),
    mistake("finite_number_for_nothing", _starts_at(-1e9)),
    *(
        replace(
            mistake("finite_number_for_nothing"), name=f"starts_at_{number:.0e}", imitate=_starts_at(number)
        )
        for number in (-1e4, -1e10, -1e20, -1e30, float(torch.finfo(torch.float32).min))
    ),
    mistake("state_in_bf16"),
    mistake("state_forced_to_float32"),
)

UPDATE = (
    mistake("nothing_seen_is_nan", _masked_nan),
    mistake("rows_share_a_maximum", _shared_maximum),
    mistake("never_rescales", _no_rescale),
    mistake("acc_not_rescaled", _only_total),
    mistake("total_not_rescaled", _only_acc),
    mistake("rescales_upside_down", _upside_down),
    mistake("upside_down_from_nothing", _upside_down_from_nothing),
    mistake("maximum_of_the_block", _block_maximum),
    mistake("block_against_its_own", _own_maximum),
    mistake("normalises_acc", _normalised),
    mistake("returns_the_old_maximum", _old_maximum),
    mistake("maximum_at_least_zero", _never_below_zero),
)

STREAM = (
    mistake("mean_of_blocks", _mean_of_blocks),
    mistake("never_divides", _undivided),
    mistake("drops_the_last_block", _dropped),
    mistake("no_scale", lambda q, k, v, block: stream(q * q.shape[-1] ** 0.5, k, v, block)),
    mistake("scale_by_block", lambda q, k, v, block: stream(q * (q.shape[-1] / block) ** 0.5, k, v, block)),
    mistake("bare_lse", _bare_lse),
    mistake("scores_not_stable", lambda q, k, v, block: _blocks(q, k, v, block, _unprotected)),
    mistake("streams_in_bf16"),
    mistake("whole_row_at_once"),
    mistake("grows_with_the_keys"),
    mistake("converts_everything"),
)
