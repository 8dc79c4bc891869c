"""Score rules: a soft cap on the scores, and dropout of weights, for which all ranks draw the same numbers.

A call of attention has `ScoreRules`; a block backend receives `TileRules`, the rules of one tile.

Dropout draws from Philox4x32-10, a function of a counter and a key. The key is the seed. The counter of a
pair is (key position, query position, batch, query head // 4), and each head takes one of the four words
that Philox returns. The same pairs are therefore dropped in forward and backward, under every layout and
schedule, and on any number of ranks, and no mask is sent or kept. With dropout factors f,
delta_i = Σ_j p_ij f_ij dO_i·v_j = dO_i·out_i, so delta is computed from out as without dropout.
Source: Salmon et al. 2011, doi 10.1145/2063384.2063405.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ringlab.errors import DeviceError, DtypeError, MaskError, ShapeError
from ringlab.merge import state_dtype
from ringlab.upload import upload

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


@dataclass(frozen=True)
class ScoreRules:
    """The rules besides scale and mask that turn scores into weights. Rules are compared and hashed by value.

    softcap: scores s become softcap·tanh(s/softcap).
    dropout: weights are dropped with this probability after the softmax, and the kept ones are divided by 1
    − dropout.
    seed: 64 bits, equal on all ranks of a sequence, but different for each layer, step and data-parallel
    replica.
    first_head: the number of this rank's first query head, if the rank has only some of the heads.

    Raises: MaskError for a softcap that is not above 0, a dropout outside [0, 1), or a seed outside 64 bits.
    """

    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    first_head: int = 0

    def __post_init__(self) -> None:
        if self.softcap is not None and not (_number(self.softcap) and 0 < self.softcap < float("inf")):
            remedy = "softcap=None for none, which flash-attn writes as 0.0" if self.softcap == 0 else ""
            raise MaskError("softcap=, a finite number above 0, or None", repr(self.softcap), remedy)
        if not (_number(self.dropout) and 0 <= self.dropout < 1):
            raise MaskError("dropout=, a probability from 0 to below 1", repr(self.dropout))
        if not (isinstance(self.seed, int) and 0 <= self.seed < 1 << 64):
            raise MaskError("seed=, an integer of 64 bits, 0 or more, the same on all ranks", repr(self.seed))

    @cached_property
    def requirements(self) -> frozenset[str]:
        """Return the rules that a block must support, among "softcap" and "dropout"."""
        used = {"softcap": self.softcap is not None, "dropout": self.dropout > 0}
        return frozenset(name for name, is_used in used.items() if is_used)

    def of_tile(self, rows: Int[np.ndarray, " rows"], keys: Int[np.ndarray, " keys"]) -> TileRules:
        """Return the rules of the tile whose queries and keys have these global positions."""
        return TileRules(self, torch.from_numpy(rows), torch.from_numpy(keys))


@dataclass(frozen=True)
class TileRules:
    """The `ScoreRules` of one tile, with the global positions of its queries, `rows`, and of its `keys`.

    Only dropout reads positions; without it they may be empty.
    """

    rules: ScoreRules
    rows: Int64[Tensor, " rows"]
    keys: Int64[Tensor, " keys"]

    @property
    def requirements(self) -> frozenset[str]:
        """Return the names of the rules that a block must support. There are none for plain attention."""
        return self.rules.requirements

    def part(self, rows: slice, keys: slice) -> TileRules:
        """Return the rules of a part of the tile."""
        if not self.rules.dropout:
            return self
        return replace(self, rows=self.rows[rows], keys=self.keys[keys])

    def reversed(self) -> TileRules:
        """Return the rules of the tile with the order of rows and keys reversed."""
        if not self.rules.dropout:
            return self
        return replace(self, rows=self.rows.flip(0), keys=self.keys.flip(0))

    def capped(self, scores: Float[Tensor, "*heads rows keys"]) -> Float[Tensor, "*heads rows keys"]:
        """Return the scores after the soft cap."""
        cap = self.rules.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def cap_slope(
        self, capped: Float[Tensor, "*heads rows keys"]
    ) -> Float[Tensor, "*heads rows keys"] | None:
        """Return the derivative of the soft cap at the scores, 1 − tanh², or None without a cap."""
        cap = self.rules.softcap
        return None if cap is None else 1 - (capped / cap) ** 2

    def dropout_factors(
        self, batch: int, heads: int, like: Float[Tensor, "..."]
    ) -> Float[Tensor, "B H rows keys"] | None:
        """Return the factors of the weights, 0 or 1/(1 − dropout), in the dtype and on the device of `like`.

        Without dropout, return None.
        """
        rate, first = self.rules.dropout, self.rules.first_head
        if not rate:
            return None
        groups = torch.arange(first // 4, (first + heads - 1) // 4 + 1, device=like.device)
        words = philox(
            upload(self.keys, like.device),
            upload(self.rows, like.device)[:, None],
            torch.arange(batch, device=like.device)[:, None, None, None],
            groups[:, None, None],
            self.rules.seed,
        )
        drawn = torch.stack(torch.broadcast_tensors(*words), dim=2).flatten(1, 2)
        drawn = drawn[:, first % 4 : first % 4 + heads]
        return (drawn >= round(rate * 2**32)).to(like.dtype) / (1 - rate)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def philox(
    c0: Int64[Tensor, "..."],
    c1: Int64[Tensor, "..."],
    c2: Int64[Tensor, "..."],
    c3: Int64[Tensor, "..."],
    key: int,
) -> tuple[Int64[Tensor, "..."], Int64[Tensor, "..."], Int64[Tensor, "..."], Int64[Tensor, "..."]]:
    """Return the four 32-bit words that Philox4x32-10 makes of the counter (c0, c1, c2, c3) and a 64-bit key.

    Words are int64 tensors. Counters of different shapes are broadcast only where they are combined.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [f"{word.item():08x}" for word in philox(zero, zero, zero, zero, key=0)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    k0, k1 = key & _WORD, key >> 32
    for _ in range(_ROUNDS):
        # Products wrap around at 64 bits, which keeps the lower 64 bits correct. A shift to the right fills
        # in copies of the sign bit, and the mask removes these copies.
        a, b = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (b >> 32 & _WORD) ^ c1 ^ k0,
            b & _WORD,
            (a >> 32 & _WORD) ^ c3 ^ k1,
            a & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def check_scale(scale: Any, dtype: torch.dtype) -> None:
    """Check that `scale` is None, or finite in the dtype of the scores of tensors of `dtype`. Raises: DtypeError."""
    if scale is None:
        return
    of_scores = state_dtype(dtype)
    largest = torch.finfo(of_scores).max
    if not (isinstance(scale, (int, float)) and -largest <= scale <= largest):  # false for NaN too
        raise DtypeError(f"scale= a number that is finite in {of_scores}, or None for D^−½", repr(scale))


def check_sinks(sinks: Any, q: Float[Tensor, "B H L D"]) -> None:
    """Check that `sinks` is None, or has one number for each query head, on the device of q.

    Raises: ShapeError, DtypeError, DeviceError.
    """
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.shape != q.shape[1:2]:
        got = str(tuple(sinks.shape)) if isinstance(sinks, Tensor) else type(sinks).__name__
        needed = f"sinks as a tensor ({q.shape[1]},), one logit of each query head"
        raise ShapeError(needed, got, "pass the sinks of the heads of q")
    if not sinks.is_floating_point():
        raise DtypeError("sinks of a floating point dtype", str(sinks.dtype))
    if sinks.device != q.device:
        raise DeviceError("sinks on the device of q", f"{sinks.device} and {q.device}")


PLAIN_RULES = TileRules(ScoreRules(), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
"""The rules of any tile of plain attention: scores stay as they are, and no weight is dropped."""
