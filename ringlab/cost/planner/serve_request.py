"""A request for serving on a grid of tokens × heads, and the bytes that one of its GPUs reads per token.

Three ways to share a model among `token_ranks` × `head_ranks` = N GPUs:

    copies   all `token_ranks` of a row hold copies of their tensor-parallel weights; each sends its partials to all others
    dcp      weights are shared by all N; a rank computes the queries of H/N heads, which are gathered (decode context parallelism)
    helix    weights are shared by all N; a rank computes the queries of H/head_ranks heads (Helix, arXiv 2507.07120)

With one token rank the three ways are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.memory import kv_cache_bytes, parameter_bytes
from ringlab.cost.models import Layer, Model, model
from ringlab.cost.planner.parallelism import Group, placed
from ringlab.cost.planner.request import MOST_TOKENS, SHARINGS, check_chunks, check_count
from ringlab.cost.serving import decode_heads_traffic, helix_traffic
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.units import nearest
from ringlab.errors import CostError


@dataclass(frozen=True)
class ServeRequest:
    """A model that serves `sequences` of `context` tokens each on N = token_ranks · head_ranks GPUs.

    chunk: the number of a prompt's tokens that are fed at once. generated: the number of the context's tokens
    that the model writes; the others are the prompt. sharing: "copies", "dcp" or "helix". merge, travels: as
    in `ringlab.serving`; ranks with copies gather their partials.
    Raises: CostError for sizes that are not positive integers, unknown names, heads or a feed-forward that the ranks cannot
    share, a context without a prompt, or a dtype that the hardware does not compute in.

    >>> from ringlab.cost.planner.serve_request import ServeRequest
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
    sharing: str = "helix"
    merge: str = "all-to-all"
    travels: str = "auto"
    generated: int = 0

    def __post_init__(self) -> None:
        for name in ("sequences", "context", "token_ranks", "head_ranks", "chunk"):
            check_count(name, getattr(self, name), MOST_TOKENS)
        check_chunks(self.context, self.generated, self.chunk)
        self.machine.peak(self.dtype)
        if self.travels not in ("auto", "kv", "q"):
            raise CostError("travels= auto, kv or q", repr(self.travels))
        if self.sharing not in SHARINGS:
            raise CostError(
                f"sharing among {', '.join(SHARINGS)}", repr(self.sharing), nearest(self.sharing, SHARINGS)
            )
        decode_heads_traffic(self.sizes, 1, merge=self.merge)
        self._check_shares()

    def _check_shares(self) -> None:
        """Check that the ranks can share the heads and the feed-forward. Raises: CostError if not."""
        ranks = self.head_ranks if self.sharing == "copies" else self.gpus
        for it in self.sized.kinds:
            if self.sharing != "copies":
                helix_traffic(it.attention(), self.token_ranks, self.head_ranks)
            elif it.H % ranks or (it.dealt_heads % ranks and ranks % it.dealt_heads):
                needed = f"ranks that can share {it.H} query and {it.dealt_heads} K/V heads"
                raise CostError(needed, f"head_ranks={ranks}")
            for width in it.widths:
                if width % ranks:
                    raise CostError(f"ranks that can share a feed-forward of width {width}", f"{ranks}")

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
    def prompt(self) -> int:
        """Return the number of tokens in a prompt."""
        return self.context - self.generated

    @property
    def sizes(self) -> Attention:
        """Return the sizes of a layer's attention for one token of every sequence, on all GPUs together."""
        return self.sized.attention(B=self.sequences, dtype=self.dtype)

    @property
    def row_sizes(self) -> Attention:
        """Return the sizes of the attention of one sequence for the heads of one rank."""
        return self.of_rank(self.sized.main)

    def of_rank(self, it: Layer) -> Attention:
        """Return the sizes of one layer's attention of one sequence for the heads of one rank."""
        H, K = it.H // self.head_ranks, max(1, it.dealt_heads // self.head_ranks)
        return Attention(1, H, K, it.D, self.dtype, True, it.Dv, it.latent or None)

    @property
    def prefill(self) -> ServeRequest:
        """Return the request that decides the time of a prompt: one sequence, with weights divided by heads only."""
        return replace(self, sequences=1, sharing="copies", context=self.prompt, generated=0)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that one rank holds.

        If all N ranks share the weights, every rank of a row still has the matrices for K and V of the row's
        heads, and with helix also for their queries. Each expert is shared by its width, like any feed-forward.
        Latents, routers and norms are whole on every rank.
        """
        it, N, size = self.sized, self.gpus, element_bytes(self.dtype)
        if self.sharing == "copies":
            return parameter_bytes(it, self.dtype, 1, self.head_ranks)
        layers = sum(kind.layers * self._layer_weights(kind) for kind in it.kinds)
        return size * (layers + it.rank_vocabulary_parameters(N) + it.norm_parameters)

    def _layer_weights(self, it: Layer) -> int:
        """Return the weights of one layer on a rank, if all N ranks share the weights."""
        N, d = self.gpus, it.d_model
        fed = it.rank_common_parameters(N) - it.rank_mixer_parameters(N) + it.expert_parameters // N
        if it.linear:  # one rank of each row computes with its states
            return fed + it.rank_mixer_parameters(self.head_ranks)
        query_ranks = N if self.sharing == "dcp" else self.head_ranks
        queries, out = it.H // query_ranks * it.D * (2 if it.output_gate else 1), it.H // N * it.value_dim
        if not it.kv_latent:
            keys = it.K * (it.D + it.value_dim) // self.head_ranks
            return d * (queries + keys + out) + fed
        asked = (it.q_latent or 0) * d + queries * (it.q_latent or d)
        made = it.kv_latent * it.H * (it.D - (it.rope or 0) + it.value_dim) // self.head_ranks
        return asked + d * it.latent_numbers + made + d * out + fed

    def read_bytes(self, tokens: int) -> int:
        """Return the bytes of weights that a rank reads for `tokens` tokens: all but unused experts'.

        Each token goes to active_experts of the experts, evenly: of E experts with k for a token, n tokens leave
        E·(1 − k/E)^n unused.
        """
        unused = sum(
            it.layers * it.expert_parameters * (1 - (it.active_experts or 0) / it.experts) ** tokens
            for it in self.sized.kinds
            if it.experts
        )
        return self.weight_bytes - int(unused * element_bytes(self.dtype) / self.weight_ranks)

    @property
    def weight_ranks(self) -> int:
        """Return the number of ranks that share each expert, and every feed-forward."""
        return self.head_ranks if self.sharing == "copies" else self.gpus

    @property
    def active_bytes(self) -> int:
        """Return the bytes of the weights of one rank with which one token is multiplied."""
        idle = sum(it.layers * (it.matrix_parameters - it.active_parameters) for it in self.sized.kinds)
        return self.weight_bytes - idle * element_bytes(self.dtype) // self.weight_ranks

    def cache_bytes(self, tokens: int, sequences: int) -> int:
        """Return the bytes of K and V, or of what is cached in their place, of `tokens` tokens of each sequence on one rank."""
        return kv_cache_bytes(self.sized, tokens, self.dtype, sequences, self.token_ranks, self.head_ranks)

    def among(self, ranks: int, stride: int = 1) -> Group:
        """Return a group of `ranks` GPUs, `stride` apart."""
        return placed(ranks, stride, self.machine)
