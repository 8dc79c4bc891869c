"""Serving on a grid of tokens × heads: tokens a second, and the time to the first token of a prompt fed in chunks.

Decode: attention on `token_ranks` × `head_ranks` ranks, projections and feed-forward layers shared by all N of them, as in
Helix (arXiv 2507.07120). With queries="own" each rank computes the queries of H/N heads, which are gathered: decode
context parallelism. With "all" it computes those of H/head_ranks heads.

Prefill: chunks by context parallelism over `token_ranks` and tensor parallelism over `head_ranks` (arXiv 2411.01783), on
GPUs of its own: a rank has 1/head_ranks of the weights.

Closed forms, each part one after the other: nothing is hidden in decode, and in prefill the hops of a chunk behind its
attention only. Kernel launches and the scheduler take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ringlab.cost.flops import attention_flops
from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.models import Model, model
from ringlab.cost.planner.groups import Group
from ringlab.cost.planner.request import check_count
from ringlab.cost.serving import decode_heads_traffic, helix_traffic, prefill_traffic
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.errors import CostError
from ringlab.layout import contiguous


@dataclass(frozen=True)
class ServeRequest:
    """A model that serves `sequences` of `context` tokens each on N = token_ranks · head_ranks GPUs.

    chunk: the tokens of a prompt that are fed at once. queries, merge, travels: as in `ringlab.serving`.
    Raises: CostError for sizes that are not positive integers, unknown names, heads that the ranks cannot share, or a dtype
    that the hardware does not compute in.

    >>> from ringlab.cost.planner.serve_time import ServeRequest
    >>> ServeRequest("llama3-70b", "h100", sequences=8, context=131_072, token_ranks=2, head_ranks=8).gpus
    16
    """

    model: Model | str
    hardware: Hardware | str
    sequences: int
    context: int
    token_ranks: int
    head_ranks: int
    chunk: int = 8192
    dtype: str = "bfloat16"
    queries: str = "all"
    merge: str = "all-to-all"
    travels: str = "auto"

    def __post_init__(self) -> None:
        for name in ("sequences", "context", "token_ranks", "head_ranks", "chunk"):
            check_count(name, getattr(self, name), 2**31)
        self.machine.peak(self.dtype)
        if self.travels not in ("auto", "kv", "q"):
            raise CostError("travels= auto, kv or q", repr(self.travels))
        helix_traffic(
            self.sizes, self.token_ranks, self.head_ranks
        )  # heads that cannot be shared are refused here
        decode_heads_traffic(self.sizes, 1, queries=self.queries, merge=self.merge)

    @cached_property
    def sized(self) -> Model:
        """Return the requested model."""
        return model(self.model) if isinstance(self.model, str) else self.model

    @cached_property
    def machine(self) -> Hardware:
        """Return the requested hardware."""
        return hardware(self.hardware) if isinstance(self.hardware, str) else self.hardware

    @property
    def gpus(self) -> int:
        """Return N, the number of GPUs."""
        return self.token_ranks * self.head_ranks

    @property
    def sizes(self) -> Attention:
        """Return the sizes of a layer's attention, on all GPUs together, of one token of every sequence."""
        return self.sized.attention(B=self.sequences, dtype=self.dtype)

    @property
    def row_sizes(self) -> Attention:
        """Return the sizes of the attention of one sequence for the heads of one rank."""
        it = self.sized
        return Attention(B=1, H=it.H // self.head_ranks, K=it.K // self.head_ranks, D=it.D, dtype=self.dtype)

    def among(self, ranks: int, stride: int = 1) -> Group:
        """Return a group of so many GPUs, `stride` apart."""
        node = self.machine.ranks_per_node
        across = ranks > 1 and ranks * stride > node
        return Group(ranks, min(ranks, max(1, node // stride)) if across else ranks, across, self.machine)


@dataclass(frozen=True)
class ServeTime:
    """Seconds of one token of every sequence, and of the chunks of one prompt.

    linear_s: projections and feed-forward, the longer of reading the weights and computing. cache_s: reading K and V.
    partials_s: queries and partials on their way. tensor_s: two all-reduces in every layer.
    """

    sequences: int
    linear_s: float
    cache_s: float
    partials_s: float
    tensor_s: float
    chunks_s: tuple[float, ...]

    @property
    def token_s(self) -> float:
        """Return the seconds in which every sequence grows by a token."""
        return self.linear_s + self.cache_s + self.partials_s + self.tensor_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens of all sequences in a second."""
        return self.sequences / self.token_s

    @property
    def first_token_s(self) -> float:
        """Return the seconds from a prompt to its first token: those of all its chunks."""
        return sum(self.chunks_s)

    def as_dict(self) -> dict[str, object]:
        """Return all figures, in seconds, and tokens a second."""
        return {
            "token_s": self.token_s,
            "tokens_per_s": self.tokens_per_s,
            "first_token_s": self.first_token_s,
            "linear_s": self.linear_s,
            "cache_s": self.cache_s,
            "partials_s": self.partials_s,
            "tensor_s": self.tensor_s,
            "chunks_s": list(self.chunks_s),
        }


def serve_time(request: ServeRequest) -> ServeTime:
    """Return the times of a request.

    >>> from ringlab.cost.planner.serve_time import ServeRequest, serve_time
    >>> one, two = (ServeRequest("llama3-70b", "h100", 8, 2**20, ranks, 8) for ranks in (1, 2))
    >>> serve_time(one).cache_s / serve_time(two).cache_s      # twice the ranks, each with half of the tokens
    2.0
    """
    it, layers = request.sized, request.sized.layers
    held = -(-request.context // request.token_ranks) * request.sequences
    whole = request.sequences * it.d_model * element_bytes(request.dtype)
    starts = range(0, request.context, request.chunk)
    return ServeTime(
        sequences=request.sequences,
        linear_s=_linear_s(request, weights_of_rank(request), request.sequences),
        cache_s=layers * held * request.row_sizes.block_bytes_per_token / request.machine.memory_bytes_per_s,
        partials_s=layers * _partials_s(request),
        tensor_s=layers * 2 * request.among(request.gpus).reduce_s(whole),
        chunks_s=tuple(chunk_s(request, at, min(request.chunk, request.context - at)) for at in starts),
    )


def weights_of_rank(request: ServeRequest) -> int:
    """Return the weights that one rank reads for a token: matrices of all layers, and its share of the vocabulary.

    Every rank of a row computes K and V of the row's heads, and queries of these heads too if queries="all".
    """
    it, N = request.sized, request.gpus
    query_ranks = N if request.queries == "own" else request.head_ranks
    per_head = it.d_model * it.D
    attention = per_head * (it.H // query_ranks + 2 * it.K // request.head_ranks + it.H // N)
    return (
        it.layers * (attention + it.ffn_matrices * it.d_model * it.d_ff // N)
        + it.vocabulary * it.d_model // N
    )


def chunk_s(request: ServeRequest, prefix: int, new: int) -> float:
    """Return the seconds of `new` tokens of one prompt after `prefix` cached ones, in all layers."""
    it, P = request.sized, request.token_ranks
    rows = -(-new // P)
    weights = it.layers * it.layer_matrix_parameters // request.head_ranks
    whole = rows * it.d_model * element_bytes(request.dtype)
    tensor_s = 2 * request.among(request.head_ranks).reduce_s(whole)
    return _linear_s(request, weights, rows) + it.layers * (
        tensor_s + _chunk_attention_s(request, prefix, new)
    )


def _linear_s(request: ServeRequest, weights: int, tokens: int) -> float:
    machine = request.machine
    read = weights * element_bytes(request.dtype) / machine.memory_bytes_per_s
    return max(read, 2 * weights * tokens / (machine.peak(request.dtype) * machine.reached.linear))


def _partials_s(request: ServeRequest) -> float:
    """Return the seconds of one layer's queries and partials: one collective after the other among a row's ranks."""
    P = request.token_ranks
    if P == 1:
        return 0.0
    it = request.sizes
    of_row = Attention(it.B, it.H // request.head_ranks, it.K // request.head_ranks, it.D, it.dtype)
    traffic = decode_heads_traffic(of_row, P, queries=request.queries, merge=request.merge)
    among = request.among(P)
    return sum(among.exchange_s(sent * P / (P - 1)) for sent in traffic.by_step_bytes)


def _chunk_attention_s(request: ServeRequest, prefix: int, new: int) -> float:
    """Return the seconds of one layer's attention of a chunk, equal on all ranks: P blocks, P − 1 of which hide a hop."""
    P, sizes, machine = request.token_ranks, request.row_sizes, request.machine
    scores = new * prefix + new * (new + 1) // 2
    rate = machine.peak(request.dtype) * machine.reached.attention_forward
    block = attention_flops(sizes, scores) / rate / P**2
    if P == 1:
        return block
    layout, cached = contiguous(new, P), contiguous(prefix, P).lengths
    ways = ("kv", "q") if request.travels == "auto" else (request.travels,)
    sent = min(prefill_traffic(sizes, layout, cached, travels=way).total_bytes for way in ways)
    # Ranks of one row lie head_ranks apart: those that share heads exchange more often, and are neighbours.
    link = request.among(P, request.head_ranks).link
    hop = link.latency_s + sent / (P - 1) / link.bytes_per_s
    return block + (P - 1) * max(block, hop)
