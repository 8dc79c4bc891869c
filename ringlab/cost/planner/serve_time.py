"""Serving on a grid of tokens × heads: tokens a second, and the time to the first token of a prompt fed in chunks.

Decode reads the weights and the K/V cache once for a token, and merges partial results. Weights are shared in
one of the three ways of `serve_request`.

Prefill runs on other GPUs than decode. Its chunks use context parallelism over `token_ranks` and tensor
parallelism over `head_ranks` (arXiv 2411.01783), and a rank has 1/head_ranks of the weights.

The times are closed forms, in which the parts follow one another. Decode hides no communication. Prefill
hides only the hops of a chunk, behind the chunk's attention. Kernel launches and the scheduler take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ringlab.cost.flops import attention_flops, visible_pairs
from ringlab.cost.models import Layer
from ringlab.cost.planner.memory_table import check_fits
from ringlab.cost.planner.serve_request import ServeRequest
from ringlab.cost.planner.step_time import states_s
from ringlab.cost.scan_traffic import SCANS, LinearAttention, scan_flops
from ringlab.cost.serving import decode_heads_traffic, prefill_traffic
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.layout import contiguous

__all__ = ["ServeRequest", "ServeTime", "chunk_s", "serve_time", "serving_time"]


@dataclass(frozen=True)
class ServeTime:
    """Seconds in which every sequence grows by one token when its context is full, and seconds of each chunk of a prompt."""

    sequences: int
    generated: int
    token: DecodeTime
    chunks_s: tuple[float, ...]

    @property
    def token_s(self) -> float:
        """Return the seconds in which every sequence grows by a token."""
        return self.token.total_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens of all sequences in a second."""
        return self.sequences / self.token_s

    @property
    def first_token_s(self) -> float:
        """Return the seconds from a prompt to its first token, which are those of all its chunks."""
        return sum(self.chunks_s)

    @property
    def answer_s(self) -> float:
        """Return the seconds from a prompt to the last generated token, if nothing waits."""
        return self.first_token_s + max(0, self.generated - 1) * self.token_s

    @property
    def prefill_groups(self) -> float | None:
        """Return the number of GPU groups that feed prompts as fast as sequences end; None if nothing is generated."""
        if not self.generated:
            return None
        return self.sequences * self.first_token_s / (self.generated * self.token_s)

    def as_dict(self) -> dict[str, object]:
        """Return all figures, which are seconds and tokens per second."""
        return {
            "token_s": self.token_s,
            "tokens_per_s": self.tokens_per_s,
            "first_token_s": self.first_token_s,
            "answer_s": self.answer_s,
            "prefill_groups": self.prefill_groups,
            "chunks_s": list(self.chunks_s),
        }


def serve_time(request: ServeRequest) -> ServeTime:
    """Return the times of a request that fits into memory.

    Raises: CostError with the needed and the available bytes, and the number of sequences that fits.

    >>> from ringlab.cost.planner.serve_time import ServeRequest, serve_time
    >>> one, two = (ServeRequest("llama3-70b", "h100", 1, 2**20, ranks, 8) for ranks in (1, 2))
    >>> serve_time(one).token.cache_s / serve_time(two).token.cache_s      # twice the ranks, each with half of the tokens
    2.0
    """
    check_fits(request)
    return serving_time(request)


def serving_time(request: ServeRequest) -> ServeTime:
    """Return the times of a request, whether it fits into memory or not."""
    return ServeTime(request.sequences, request.generated, decode_time(request), _chunks_s(request.prefill))


@lru_cache(maxsize=256)
def _chunks_s(request: ServeRequest) -> tuple[float, ...]:
    starts = range(0, request.prompt, request.chunk)
    return tuple(chunk_s(request, at, min(request.chunk, request.prompt - at)) for at in starts)


def chunk_s(request: ServeRequest, prefix: int, new: int) -> float:
    """Return the seconds of `new` tokens of one prompt after `prefix` cached ones, in all layers."""
    it, P = request.sized, request.token_ranks
    rows, size = -(-new // P), element_bytes(request.dtype)
    tp = request.head_ranks
    weights = sum(kind.layers * kind.gathered_parameters(1, 1, tp) for kind in it.kinds)
    active = sum(kind.layers * kind.rank_active_parameters(tp) for kind in it.kinds)
    whole = rows * it.d_model * element_bytes(request.dtype)
    tensor_s = 2 * request.among(request.head_ranks).reduce_s(whole)
    layers_s = sum(
        kind.layers * (tensor_s + _chunk_attention_s(request, prefix, new, kind)) for kind in it.kinds
    )
    return linear_s(request, size * weights, size * active, rows) + layers_s


def _chunk_attention_s(request: ServeRequest, prefix: int, new: int, layer: Layer | None = None) -> float:
    """Return the seconds of one layer's attention of a chunk, equal on all ranks: P blocks, of which P − 1 hide a hop.

    layer: by default one that attends to all tokens. With a window, tokens before it do not count. A gated
    delta rule passes a state from rank to rank after the chunk.
    """
    it = layer or request.sized.main
    P, sizes, machine = request.token_ranks, request.of_rank(it), request.machine
    rate = machine.peak(request.dtype) * machine.reached.attention_forward
    if it.linear:
        of_rank = LinearAttention(1, sizes.H, it.D, it.value_dim, request.dtype)
        link = request.among(P, request.head_ranks).link
        passing_s = min(states_s(of_rank, P, scan, link) for scan in SCANS) if P > 1 else 0.0
        return scan_flops(of_rank, -(-new // P)) / rate + passing_s
    prefix = prefix if it.window is None else min(prefix, it.window - 1)
    scores = visible_pairs(new, True, it.window, prefix)
    block = attention_flops(sizes, scores) / rate / P**2
    if P == 1:
        return block
    ways = ("kv", "q") if request.travels == "auto" else (request.travels,)
    sent = min(_most_sent_bytes(request, prefix, new, way, sizes) for way in ways)
    # Ranks of one row are head_ranks apart, because ranks that share heads exchange more often and are
    # neighbours.
    link = request.among(P, request.head_ranks).link
    hop = link.latency_s + sent / (P - 1) / link.bytes_per_s
    return block + (P - 1) * max(block, hop)


def _most_sent_bytes(
    request: ServeRequest, prefix: int, new: int, travels: str, sizes: Attention | None = None
) -> int:
    """Return the bytes of the rank that sends most: one of the last two, since no shard is longer than the one before."""
    P = request.token_ranks
    layout, cached = contiguous(new, P), contiguous(prefix, P).lengths
    last = (
        prefill_traffic(sizes or request.row_sizes, layout, cached, travels=travels, rank=rank)
        for rank in (P - 2, P - 1)
    )
    return max(traffic.total_bytes for traffic in last)


@dataclass(frozen=True)
class DecodeTime:
    """Seconds of one token of every sequence, in parts that follow one another.

    weights_s: the longer of reading the weights and computing with them. cache_s: reading K and V, behind
    which their arithmetic hides. tensor_s: TP's two all-reduces in every layer. merge_s: sending queries,
    partial outputs and log-sum-exps between the ranks that share the cache.
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
    merged = [it for it in request.sized.kinds if not it.linear]  # a state is on every rank of its heads
    return DecodeTime(
        weights_s=_weights_s(request),
        cache_s=max(cache / request.machine.memory_bytes_per_s, _scores_s(request)),
        tensor_s=2 * layers * tensor.reduce_s(row),
        merge_s=sum(it.layers * _merge_s(request, it) for it in merged),
    )


def _weights_s(request: ServeRequest) -> float:
    read = request.read_bytes(request.sequences)
    return linear_s(request, read, request.active_bytes, request.sequences)


def _scores_s(request: ServeRequest) -> float:
    """Return the seconds of the arithmetic of one token's attention in latent layers, 0 without a latent.

    A latent is read once for all heads of a rank, which may take less time than computing with it. For each
    head and cached token, the score takes a product with the whole latent, and the value one with the latent
    without its common part. With K/V heads, reading takes longer.
    """
    numbers = sum(
        it.layers * it.H // request.head_ranks * (it.latent + (it.kv_latent or 0))
        for it in request.sized.kinds
        if it.latent
    )
    tokens = -(-request.context // request.token_ranks) * request.sequences
    machine = request.machine
    return 2 * numbers * tokens / (machine.peak(request.dtype) * machine.reached.attention_forward)


def is_computing(request: ServeRequest) -> bool:
    """Return whether computing with the matrices of a token takes longer than reading their weights."""
    read = request.read_bytes(request.sequences) / request.machine.memory_bytes_per_s
    return _weights_s(request) > read


def linear_s(request: ServeRequest, weight_bytes: int, active_bytes: int, tokens: int) -> float:
    """Return the longer of the seconds of reading these weights, and of computing for `tokens` tokens with the active ones."""
    machine = request.machine
    flops = 2 * active_bytes / element_bytes(request.dtype) * tokens
    read = weight_bytes / machine.memory_bytes_per_s
    return max(read, flops / (machine.peak(request.dtype) * machine.reached.linear))


def _merge_s(request: ServeRequest, layer: Layer) -> float:
    """Return the seconds of one layer's queries and partials, collective by collective, among the ranks of a row."""
    P, it = request.token_ranks, layer.attention(request.sequences, request.dtype)
    if P == 1:
        return 0.0
    heads = it.H // request.head_ranks
    if request.sharing == "copies":
        partial = it.B * heads * (it.value_dim + 1) * 4
        return request.among(P, request.head_ranks).gather_s(partial * P)
    of_row = Attention(it.B, heads, max(1, layer.dealt_heads // request.head_ranks), it.D, it.dtype, Dv=it.Dv)
    queries = "own" if request.sharing == "dcp" else "all"
    traffic = decode_heads_traffic(of_row, P, queries=queries, merge=request.merge)
    among = request.among(P)
    return sum(among.exchange_s(sent * P / (P - 1)) for sent in traffic.by_step_bytes)
