"""Exercise 04: the plainest flash forward over padded buffers, and the common mistakes made with it in a kernel.

Imitations take what the learner's function takes, (q, k, v, out, lse, S, shift, block_m, block_n), with shift None where
nothing is masked. They return the first S rows of out or of lse. A block holds block_m rows of a group's packed queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Imitation = Callable[..., Tensor]


def visible_pairs(S: int, shift: int | None) -> Tensor:
    """Return which query row sees which key: j <= i + shift, or all of them."""
    rows, keys = torch.arange(S)[:, None], torch.arange(S)
    return keys <= rows + (S if shift is None else shift)


def shared(x: Tensor, heads: int) -> Tensor:
    """Return the key head of every query head: neighbours share."""
    return x.repeat_interleave(heads // len(x), dim=0)


def blocks_of(q: Tensor, k: Tensor, S: int, m: int) -> Tensor:
    """Return the number of the block that computes each head's token, (H, S, 1)."""
    group = len(q) // len(k)
    heads, tokens = torch.arange(len(q))[:, None, None], torch.arange(S)[:, None]
    return (tokens * group + heads % group) // m


def end_of(block: Tensor, group: int, m: int) -> Tensor:
    """Return the token after the last one of a block, were the tokens without end."""
    return ((block + 1) * m - 1) // group + 1


def scores_of(q: Tensor, k: Tensor, S: int, shift: int | None) -> Tensor:
    """Return the scores (H, S, S) in float32, −inf where a key is hidden."""
    q, k = q[:, :S].float(), shared(k, len(q))[:, :S].float()
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible_pairs(S, shift), -math.inf)


def values_of(q: Tensor, v: Tensor, S: int) -> Tensor:
    """Return the values that every query head reads, (H, S, D), in float32."""
    return shared(v, len(q))[:, :S].float()


def weights_of(scores: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return e^(s − m), rounded to dtype, and their sum in float32; a row that sees no key has zeros."""
    maximum = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - torch.where(maximum == -math.inf, 0.0, maximum))
    return powers.to(dtype).float(), powers.sum(-1, keepdim=True)


def attend(scores: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return out for given scores; 0 where no key is seen."""
    powers, total = weights_of(scores, dtype)
    return powers @ v.float() / torch.where(total == 0, 1.0, total)


def plain(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: int | None, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return (out, lse): weights rounded to v's dtype for the product, as a matrix unit wants them, sums in float32."""
    scores = scores_of(q, k, S, shift)
    return attend(scores, values_of(q, v, S), v.dtype).to(out.dtype), torch.logsumexp(scores, -1)


def changed(change: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out whose scores went through `change(scores, S, shift, block_m, block_n)`."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        return attend(change(scores_of(q, k, S, shift), S, shift, m, n), values_of(q, v, S))

    return imitate


def masked(see: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out with another mask: `see(rows, keys, S, shift, m, n, block, group)` is True for visible."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        if shift is None:
            raise ValueError("there is no mask here")
        rows, keys = torch.arange(S)[:, None], torch.arange(S)[None, :]
        seen = see(rows, keys, S, shift, m, n, blocks_of(q, k, S, m), len(q) // len(k))
        return attend(scores_of(q, k, S, None).masked_fill(~seen, -math.inf), values_of(q, v, S))

    return imitate


def up_to(stop: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out whose loop ends at `stop(block, shift, m, n, group)`, the mask being right."""

    def see(
        rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
    ) -> Tensor:
        tiles = -(-stop(block, shift, m, n, group) // n)
        return (keys <= rows + shift) & (keys < tiles * n)

    return masked(see)


def by_packed_row(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return a mask that compares keys with rows of the packed matrix instead of tokens."""
    return keys <= _packed(rows, block, group) + shift


def by_packed_row_in_seen_tiles(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return that mask in a loop that ends at the right tile."""
    seen = by_packed_row(rows, keys, S, shift, m, n, block, group)
    return seen & (keys < -(-(end_of(block, group, m) + shift) // n) * n)


def within_the_tile(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return a mask that compares places inside the tile."""
    return keys % n <= _packed(rows, block, group) % m + shift


def shift_backwards(
    rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int, block: Tensor, group: int
) -> Tensor:
    """Return a mask that moves the wrong way, in a loop that ends at the right tile."""
    return (keys <= rows - shift) & (keys < -(-(end_of(block, group, m) + shift) // n) * n)


def _packed(rows: Tensor, block: Tensor, group: int) -> Tensor:
    """Return the packed rows of the tokens `rows` of every head, (H, S, 1)."""
    return rows * group + torch.arange(len(block))[:, None, None] % group


def streamed(step: Callable[..., tuple[Tensor, Tensor, Tensor]], *, divide: bool = True) -> Imitation:
    """Return the imitation of out that goes tile by tile with `step(m, total, acc, scores, values)`."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        scores, values = scores_of(q, k, S, shift), values_of(q, v, S)
        state = (
            torch.full(scores.shape[:-1], -math.inf),
            torch.zeros(scores.shape[:-1]),
            torch.zeros_like(values),
        )
        for first in range(0, S, n):
            state = step(*state, scores[..., first : first + n], values[:, first : first + n])
        return state[2] / state[1][..., None] if divide else state[2]

    return imitate


def rescaled(*, total: bool, acc: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a step that, when the maximum grows, rescales only what is asked for."""

    def step(
        m: Tensor, old_total: Tensor, old_acc: Tensor, scores: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        new, powers = _tile(m, scores)
        factor = torch.exp(m - new)
        kept = old_total * factor if total else old_total, old_acc * factor[..., None] if acc else old_acc
        return new, kept[0] + powers.sum(-1), kept[1] + powers @ values

    return step


def divided_each_time(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the accumulator by the sum in every tile, as if it were still a sum afterwards."""
    new, powers = _tile(m, scores)
    factor = torch.exp(m - new)
    total = total * factor + powers.sum(-1)
    return new, total, (acc * factor[..., None] + powers @ values) / total[..., None]


def maximum_of_the_tile(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the tile's own maximum for the new one."""
    new, powers = _tile(torch.full_like(m, -math.inf), scores)
    factor = torch.exp(m - new)
    return new, total * factor + powers.sum(-1), acc * factor[..., None] + powers @ values


def _tile(m: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.maximum(m, scores.amax(-1))
    return new, torch.exp(scores - new[..., None])


def not_transposed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Multiply q by tiles of k instead of their transposes, which only square tiles allow."""
    if n != q.shape[-1]:
        raise ValueError("no square tile")
    keys = torch.nn.functional.pad(values_of(q, k, S), (0, 0, 0, -S % n)).unflatten(1, (-1, n))
    scores = torch.einsum("hsd,htde->hste", q[:, :S].float(), keys).flatten(2)[..., :S] * n**-0.5
    return attend(scores.masked_fill(~visible_pairs(S, shift), -math.inf), values_of(q, v, S))


def tail_dropped(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Visit whole tiles of keys only."""
    keys = S // n * n
    if keys == 0:
        return torch.full_like(out[:, :S], math.nan).float()
    return attend(scores_of(q, k, S, shift)[..., :keys], values_of(q, v, keys))


def padding_counted(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Count the keys past the last one, loaded as 0, with a score of 0, where a causal mask lets them through."""
    missing = -S % n
    scores = torch.nn.functional.pad(scores_of(q, k, S, shift), (0, missing))
    scores = scores.masked_fill(~visible_pairs(S + missing, shift)[:S], -math.inf)
    return attend(scores, torch.nn.functional.pad(values_of(q, v, S), (0, 0, 0, missing)))


def padding_read(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Count what is stored after the last key, where a causal mask lets it through."""
    if v[:, S:].isnan().any():
        raise ValueError("a NaN tells of the loads alone")
    whole = S + -S % n
    return attend(scores_of(q, k, whole, shift)[:, :S], values_of(q, v, whole))


def in_half(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Keep the undivided sum of weights times values in float16, where it overflows."""
    if v.dtype != torch.float16:  # nothing overflows
        return plain(q, k, v, out, lse, S, shift)[0].float()
    powers, total = weights_of(scores_of(q, k, S, shift), v.dtype)
    return (powers @ values_of(q, v, S)).half().float() / total


def blind_rows_nan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Let −inf − (−inf) happen in rows that see no key."""
    return torch.softmax(scores_of(q, k, S, shift), -1) @ values_of(q, v, S)


def visited_blind_rows_nan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Let −inf − (−inf) happen, but not where a block visits no tile: there a sum of 0 is guarded."""
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    end = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S) + shift
    return torch.where((torch.arange(S)[:, None] + shift < 0) & (end > 0), math.nan, right)


def hidden_is_finite(unvisited: float) -> Imitation:
    """Return the imitation of out with a large finite number in place of −inf.

    A row that sees no key then averages the values of all lanes that its block visits, lanes past the last key too;
    a row whose block visits nothing holds `unvisited`.
    """

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        if shift is None:
            raise ValueError("there is no mask here")
        right, values = plain(q, k, v, out, lse, S, shift)[0].float(), values_of(q, v, S)
        end = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S)
        lanes = -(-(end + shift).clamp(min=0) // n) * n
        sums = torch.nn.functional.pad(values.cumsum(1), (0, 0, 1, 0))
        mean = sums.gather(1, lanes.clamp(max=S).expand_as(values)) / lanes
        blind = torch.arange(S)[:, None] + shift < 0
        return torch.where(blind, torch.where(lanes > 0, mean, unvisited), right)

    return imitate


def blind_blocks_unwritten(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Leave blocks of queries that see no key as they were."""
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    blind = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S) + shift <= 0
    return torch.where(blind, out[:, :S].float(), right)


def no_maximum(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Take exp of the scores themselves."""
    powers = torch.exp(scores_of(q, k, S, shift))
    return powers @ values_of(q, v, S) / powers.sum(-1, keepdim=True)


def no_other(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Let undefined lanes of V, here NaN, into every row that visits the last tile."""
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    end = end_of(blocks_of(q, k, S, m), len(q) // len(k), m).clamp(max=S) + (S if shift is None else shift)
    return torch.where((end > S // n * n) & (S % n > 0), math.nan, right)


def junk_times_zero(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Let NaN that is stored after V's last row into every row that visits the last tile."""
    if not v[:, S:].isnan().any():
        return plain(q, k, v, out, lse, S, shift)[0].float()
    return no_other(q, k, v, out, lse, S, shift, m, n)


def base_two(scores: Tensor, *_: Any) -> Tensor:
    """Scores as 2^s weighs them."""
    return scores * math.log(2)


def no_scale(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Leave 1/√D out."""
    return plain(q.float() * q.shape[-1] ** 0.5, k, v, out.float(), lse, S, shift)[0]


def lse_in_base_two(scores: Tensor) -> Tensor:
    """Log₂ Σ e^s."""
    return torch.logsumexp(scores, -1) / math.log(2)


def lse_by_log2(scores: Tensor) -> Tensor:
    """The maximum as it should be, and the logarithm of the sum in base 2."""
    maximum = scores.amax(-1)
    return maximum + (torch.logsumexp(scores, -1) - maximum) / math.log(2)


def lse_is_the_maximum(scores: Tensor) -> Tensor:
    """m alone."""
    return scores.amax(-1)


def lse_without_maximum(scores: Tensor) -> Tensor:
    """The logarithm of Σ e^(s − m), m left out."""
    return torch.logsumexp(scores, -1) - scores.amax(-1)


def lse_of(change: Callable[[Tensor], Tensor]) -> Imitation:
    """Return the imitation of lse made from the scores."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, *_: int
    ) -> Tensor:
        return change(scores_of(q, k, S, shift))

    return imitate
