"""The time of one sequence on a ring, forward and backward, by which dynamic context parallelism chooses ring sizes.

In a ring of d ranks, each rank has a d-th of a sequence of n tokens, dealt by zig-zag. Its costs in all
layers are

    linear layers      tokens of its share · token_s
    attention          d blocks of n(n + 1)/2 / d² visible pairs each
    communication      d − 1 hops of K and V, each hidden behind a block or waited for;
                       backward with dK and dV in float32, which a last hop brings home

so a long sequence on many ranks mostly computes, while a short sequence waits for most of its hops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from ringlab.cost.flops import attention_flops, linear_backward_flops, linear_flops, vocabulary_flops
from ringlab.cost.hardware import Hardware, Link
from ringlab.cost.models import Model
from ringlab.cost.traffic import gradient_bytes_per_token
from ringlab.errors import CostError


@dataclass(frozen=True)
class Pass:
    """The forward or the backward of attention in all layers.

    pair_s: seconds for one visible (query, key) pair. hop_bytes, home_bytes: bytes for each token of a block,
    in a hop and in the last hop of the gradients. hops: the number of times that each hop is made, once in
    each layer.
    """

    pair_s: float
    hop_bytes: int = 0
    home_bytes: int = 0
    hops: int = 1


FREE = Link("free", 1e30, 0.0, "a link that takes no time, to see what computation alone would ask for")


@dataclass(frozen=True)
class SequenceCosts:
    """The costs of a token, a pair and a hop. Rings of at most `ranks_per_node` ranks use the link `inside`.

    token_s: seconds of the linear layers for one token, forward and backward.

    >>> costs = SequenceCosts(token_s=1e-6, passes=(Pass(pair_s=1e-9),))
    >>> costs.rank_s(1000, 1), costs.rank_s(1000, 4)
    (0.0015005, 0.000375125)
    """

    token_s: float
    passes: tuple[Pass, ...]
    inside: Link = FREE
    between: Link = FREE
    ranks_per_node: int = 1

    @classmethod
    def of(cls, model: Model, machine: Hardware, dtype: str = "bfloat16") -> SequenceCosts:
        """Return the costs of training a model on this hardware, without recomputation or tensor parallelism.

        Raises: CostError for a dtype that the hardware does not compute in, or layers that are not alike.

        >>> from ringlab.cost.hardware import hardware
        >>> from ringlab.cost.models import model
        >>> costs = SequenceCosts.of(model("llama3-8b"), hardware("h100"))
        >>> round(costs.rank_s(131072, 1) / costs.rank_s(131072, 8), 2)
        7.98
        """
        peak, reached, sizes = machine.peak(dtype), machine.reached, model.only.attention(dtype=dtype)
        linear = linear_flops(model, 1) + vocabulary_flops(model, 1)
        pair, pair_back = (model.layers * attention_flops(sizes, 1, back) for back in (False, True))
        block, gradient = sizes.block_bytes_per_token, gradient_bytes_per_token(sizes)
        return cls(
            (linear + linear_backward_flops(linear)) / (peak * reached.linear),
            (
                Pass(pair / (peak * reached.attention_forward), model.layers * block, 0, model.layers),
                Pass(
                    pair_back / (peak * reached.attention_backward),
                    model.layers * (block + gradient),
                    model.layers * gradient,
                    model.layers,
                ),
            ),
            machine.inside,
            machine.between,
            machine.ranks_per_node,
        )

    def rank_s(self, length: int, degree: int) -> float:
        """Return the seconds of the rank with most tokens of a sequence on `degree` ranks. Raises: as `shares`."""
        return self.row_s((length,), degree)

    def row_s(self, lengths: Sequence[int], degree: int) -> float:
        """Return the seconds of a row of documents on one ring of `degree` ranks, each document dealt by zig-zag.

        The tokens and pairs of the documents add up; a hop carries a rank's tokens of all of them. Raises: as `shares`.

        >>> costs = SequenceCosts(token_s=1e-6, passes=(Pass(pair_s=1e-9),))
        >>> costs.row_s((1000, 1000), 4) == 2 * costs.rank_s(1000, 4)
        True
        """
        tokens = int(np.sum([shares(length, degree) for length in lengths], axis=0).max())
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        link = self.inside if degree <= self.ranks_per_node else self.between
        seconds = self.token_s * tokens
        for each in self.passes:
            block_s = each.pair_s * pairs / degree**2
            hop_s = each.hops * link.latency_s + each.hop_bytes * tokens / link.bytes_per_s
            seconds += block_s + (degree - 1) * max(block_s, hop_s)
            if degree > 1 and each.home_bytes:
                seconds += each.hops * link.latency_s + each.home_bytes * tokens / link.bytes_per_s
        return seconds


def shares(length: int, degree: int) -> Int64[np.ndarray, " degree"]:
    """Return the tokens of each of `degree` ranks under `zigzag(length, degree)`, in closed form.

    Raises: CostError for a length below 0, or a degree below 1.

    >>> shares(21, 4).tolist()
    [3, 6, 6, 6]
    """
    if length < 0 or degree < 1:
        raise CostError("a length >= 0 and a degree >= 1", f"{length} and {degree}")
    chunk = max(1, -(-length // (2 * degree)))
    pieces = np.clip(length - chunk * np.arange(2 * degree, dtype=np.int64), 0, chunk)
    return pieces[:degree] + pieces[: degree - 1 : -1]
