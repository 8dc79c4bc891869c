"""The time of one new token: weights and K/V cache are read once, partial results are merged."""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.cost.planner.serve_request import ServeRequest
from ringlab.cost.serving import decode_heads_traffic
from ringlab.cost.sizes import Attention, element_bytes


@dataclass(frozen=True)
class DecodeTime:
    """Seconds of one token of every sequence, each part after the other.

    weights_s: the longer of reading the weights and computing with them. cache_s: reading K and V; their
    arithmetic hides behind it. tensor_s: TP's two all-reduces in every layer. merge_s: queries, partial
    outputs and log-sum-exps between the ranks that share the cache.
    """

    weights_s: float
    cache_s: float
    tensor_s: float
    merge_s: float

    imbalance_s = 0.0

    @property
    def exposed_s(self) -> float:
        """Return the seconds of communication."""
        return self.tensor_s + self.merge_s

    @property
    def total_s(self) -> float:
        """Return the seconds of one token."""
        return self.weights_s + self.cache_s + self.exposed_s

    def as_dict(self) -> dict[str, object]:
        """Return all figures, seconds per token."""
        return {
            "step_s": self.total_s,
            "exposed_s": self.exposed_s,
            "imbalance_s": self.imbalance_s,
            "weights_s": self.weights_s,
            "cache_s": self.cache_s,
            "tensor_s": self.tensor_s,
            "merge_s": self.merge_s,
        }


def decode_time(request: ServeRequest) -> DecodeTime:
    """Return the time in which every sequence grows by one token, after `context` tokens."""
    layers = request.sized.layers
    row = request.sequences * request.sized.d_model * element_bytes(request.dtype)
    tensor = request.among(request.head_ranks if request.sharing == "copies" else request.gpus)
    cache = request.cache_bytes(request.context, request.sequences)
    return DecodeTime(
        weights_s=linear_s(request, request.weight_bytes, request.sequences),
        cache_s=cache / request.machine.memory_bytes_per_s,
        tensor_s=2 * layers * tensor.reduce_s(row),
        merge_s=layers * _merge_s(request),
    )


def is_computing(request: ServeRequest) -> bool:
    """Return whether the matrices of a token compute longer than their weights are read."""
    read = request.weight_bytes / request.machine.memory_bytes_per_s
    return linear_s(request, request.weight_bytes, request.sequences) > read


def linear_s(request: ServeRequest, weight_bytes: int, tokens: int) -> float:
    """Return the longer of the seconds of reading these weights, and of computing with them for `tokens` tokens."""
    machine = request.machine
    flops = 2 * weight_bytes / element_bytes(request.dtype) * tokens
    read = weight_bytes / machine.memory_bytes_per_s
    return max(read, flops / (machine.peak(request.dtype) * machine.reached.linear))


def _merge_s(request: ServeRequest) -> float:
    """Return the seconds of one layer's queries and partials, collective by collective, among the ranks of a row."""
    P, it = request.token_ranks, request.sizes
    if P == 1:
        return 0.0
    heads = it.H // request.head_ranks
    if request.sharing == "copies":
        partial = it.B * heads * (it.D + 1) * 4
        return request.among(P, request.head_ranks).gather_s(partial * P)
    of_row = Attention(it.B, heads, it.K // request.head_ranks, it.D, it.dtype)
    queries = "own" if request.sharing == "dcp" else "all"
    traffic = decode_heads_traffic(of_row, P, queries=queries, merge=request.merge)
    among = request.among(P)
    return sum(among.exchange_s(sent * P / (P - 1)) for sent in traffic.by_step_bytes)
