"""Exercise 04: the plainest flash forward over padded buffers, and the common mistakes made with it in a kernel.

Imitations take what the learner's function takes, (q, k, v, out, lse, S, shift, block_m, block_n), with shift
None where nothing is masked. Those of out return what then stands in out's first S rows, those of lse in lse's.
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


def scores_of(q: Tensor, k: Tensor, S: int, shift: int | None) -> Tensor:
    """Return the scores (H, S, S) in float32, −inf where a key is hidden."""
    q, k = q[:, :S].float(), k[:, :S].float()
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible_pairs(S, shift), -math.inf)


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
    return attend(scores, v[:, :S], v.dtype).to(out.dtype), torch.logsumexp(scores, -1)


def changed(change: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out whose scores went through `change(scores, S, shift, block_m, block_n)`."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        return attend(change(scores_of(q, k, S, shift), S, shift, m, n), v[:, :S])

    return imitate


def masked(see: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out with another mask: `see(rows, keys, S, shift, block_m, block_n)` is True for visible."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        if shift is None:
            raise ValueError("there is no mask here")
        rows, keys = torch.arange(S)[:, None], torch.arange(S)[None, :]
        seen = see(rows, keys, S, shift, m, n)
        return attend(scores_of(q, k, S, None).masked_fill(~seen, -math.inf), v[:, :S])

    return imitate


def up_to(stop: Callable[..., Tensor]) -> Imitation:
    """Return the imitation of out whose loop ends at `stop(block, shift, block_m, block_n)`, the mask being right."""

    def see(rows: Tensor, keys: Tensor, S: int, shift: int, m: int, n: int) -> Tensor:
        tiles = -(-stop(rows // m, shift, m, n) // n)
        return (keys <= rows + shift) & (keys < tiles * n)

    return masked(see)


def streamed(step: Callable[..., tuple[Tensor, Tensor, Tensor]], *, divide: bool = True) -> Imitation:
    """Return the imitation of out that goes tile by tile with `step(m, total, acc, scores, values)`."""

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        scores, values = scores_of(q, k, S, shift), v[:, :S].float()
        state = (
            torch.full(scores.shape[:-1], -math.inf),
            torch.zeros(scores.shape[:-1]),
            torch.zeros_like(values),
        )
        for first in range(0, S, n):
            state = step(*state, scores[..., first : first + n], values[:, first : first + n])
        return state[2] / state[1][..., None] if divide else state[2]

    return imitate


def acc_not_rescaled(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rescale the sum, not the accumulator."""
    new, powers = _tile(m, scores)
    return new, total * torch.exp(m - new) + powers.sum(-1), acc + powers @ values


def total_not_rescaled(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rescale the accumulator, not the sum."""
    new, powers = _tile(m, scores)
    return new, total + powers.sum(-1), acc * torch.exp(m - new)[..., None] + powers @ values


def never_rescaled(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add tiles that were measured against different maxima."""
    new, powers = _tile(m, scores)
    return new, total + powers.sum(-1), acc + powers @ values


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
    keys = torch.nn.functional.pad(k[:, :S].float(), (0, 0, 0, -S % n)).unflatten(1, (-1, n))
    scores = torch.einsum("hsd,htde->hste", q[:, :S].float(), keys).flatten(2)[..., :S] * n**-0.5
    return attend(scores.masked_fill(~visible_pairs(S, shift), -math.inf), v[:, :S])


def tail_dropped(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Visit whole tiles of keys only."""
    keys = S // n * n
    if keys == 0:
        raise ValueError("no whole tile")
    return attend(scores_of(q, k, S, shift)[..., :keys], v[:, :keys])


def padding_counted(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Count the keys past the last one, loaded as 0, with a score of 0, where a causal mask lets them through."""
    missing = -S % n
    scores = torch.nn.functional.pad(scores_of(q, k, S, shift), (0, missing))
    scores = scores.masked_fill(~visible_pairs(S + missing, shift)[:S], -math.inf)
    return attend(scores, torch.nn.functional.pad(v[:, :S].float(), (0, 0, 0, missing)))


def padding_read(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Count what stands in memory behind the last key, where a causal mask lets it through."""
    if v[:, S:].isnan().any():
        raise ValueError("a NaN tells of the loads alone")
    whole = S + -S % n
    return attend(scores_of(q, k, whole, shift)[:, :S], v[:, :whole])


def axes_swapped(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Take grid axis 0 for heads and axis 1 for query blocks."""
    heads, blocks = len(q), -(-S // m)
    right, got = plain(q, k, v, out, lse, S, shift)[0].float(), out[:, :S].float().clone()
    for head in range(min(blocks, heads)):
        got[head, : heads * m] = right[head, : heads * m]
    return got


def first_head_for_all(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Read and write head 0 whatever the program's head is."""
    got = out[:, :S].float().clone()
    got[0] = plain(q, k, v, out, lse, S, shift)[0][0].float()
    return got


def in_half(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Keep the undivided sum of weights times values in float16, where it overflows."""
    if v.dtype != torch.float16:
        raise ValueError("only float16 overflows here")
    powers, total = weights_of(scores_of(q, k, S, shift), v.dtype)
    return (powers @ v[:, :S].float()).half().float() / total


def blind_rows_nan(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Let −inf − (−inf) happen in rows that see no key."""
    return torch.softmax(scores_of(q, k, S, shift), -1) @ v[:, :S].float()


def blind_blocks_unwritten(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Leave blocks of queries that see no key as they were."""
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    blind = (torch.arange(S) // m + 1) * m + shift <= 0
    return torch.where(blind[:, None], out[:, :S].float(), right)


def no_maximum(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Take exp of the scores themselves."""
    powers = torch.exp(scores_of(q, k, S, shift))
    return powers @ v[:, :S].float() / powers.sum(-1, keepdim=True)


def no_other(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Let undefined lanes of V, here NaN, into every row that visits the last tile."""
    if S % n == 0 or v[:, S:].isnan().any():
        raise ValueError("no lane too many, or another reason for a NaN")
    return _nan_from_the_last_tile(q, k, v, out, lse, S, shift, m, n)


def junk_times_zero(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Let NaN that stands behind V's last row into every row that visits the last tile."""
    if S % n == 0 or not v[:, S:].isnan().any():
        raise ValueError("no lane too many, or no NaN behind the last token")
    return _nan_from_the_last_tile(q, k, v, out, lse, S, shift, m, n)


def _nan_from_the_last_tile(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    right = plain(q, k, v, out, lse, S, shift)[0].float()
    last = (torch.arange(S) // m + 1) * m + (S if shift is None else shift)
    return torch.where((last > S // n * n)[:, None], math.nan, right)


def head_begins(at: Callable[[int, int, int], int]) -> Imitation:
    """Return the imitation whose head h begins `at(S, capacity, D)` · h elements into the buffers, reading and writing.

    Heads may then overlap: blocks are written in the order of the interpreter, heads innermost.
    """

    def imitate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
    ) -> Tensor:
        heads, capacity, D = q.shape
        flat, place = [x.flatten() for x in (q, k, v)], out.flatten().float().clone()
        for first in range(0, S, m):
            for head in range(heads):
                begin = head * at(S, capacity, D)
                mine = [x[begin : begin + S * D].reshape(1, S, D) for x in flat]
                got = plain(*mine, out, lse, S, shift)[0][0, first : first + m].float()
                place[begin + first * D : begin + first * D + got.numel()] = got.flatten()
        return place.reshape(out.shape)[:, :S]

    return imitate


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
