"""Transformer models as data: kinds of layers with their numbers, widths and heads, each with its published source.

The tables are TOML (`tables/models.toml`), and users add their own in the same form:

    [mine]
    title = "My model"
    layers = 32
    d_model = 4096
    H = 32
    K = 8
    D = 128
    d_ff = 14336
    ffn_matrices = 3
    vocabulary = 128256
    tied_embeddings = false
    source = "its config.json"

If layers differ, each kind of layer is a table with its number of layers and all that differs from the
above. The numbers of layers add up to `layers`:

    [[mine.kind]]
    layers = 24
    window = 1024

    [[mine.kind]]
    layers = 8
    d_ff = 2048
    experts = 64
    active_experts = 4
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path

from ringlab.cost.hardware import TABLES, pick, read_entries
from ringlab.cost.sizes import Attention
from ringlab.cost.toml_file import BadValue, check_values
from ringlab.errors import CostError


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A number of layers that are alike, and their sizes; None is the model's size if it has one, or absent.

    Dv: head dim of v, D if None. window: a token attends to the last `window` tokens, its own included.
    kv_latent, rope, q_latent: latent attention (MLA). K and V are made from kv_latent numbers of a token, and
    `rope` of a key's D dims are common to all heads; queries are made from q_latent numbers, or from the token.
    heads_travel: K and V of all heads are sent and cached, as by a program for any attention, and not the latent.
    linear: a gated delta rule with H heads of v and K of q and k, behind a convolution of `convolution` tokens.
    output_gate: q is projected to twice its width, and one half gates the output.
    experts: the number of experts of the feed-forward, of which each token goes to `active_experts`. d_ff is
    then the width of one expert, and shared_d_ff that of the feed-forward that all tokens take in addition.
    """

    layers: int
    H: int | None = None
    K: int | None = None
    D: int | None = None
    d_ff: int | None = None
    ffn_matrices: int | None = None
    Dv: int | None = None
    window: int | None = None
    kv_latent: int | None = None
    rope: int | None = None
    q_latent: int | None = None
    heads_travel: bool = False
    linear: bool = False
    convolution: int | None = None
    output_gate: bool = False
    experts: int | None = None
    active_experts: int | None = None
    shared_d_ff: int | None = None

    def __post_init__(self) -> None:
        check_values(self)
        if self.ffn_matrices not in (None, 2, 3):
            raise BadValue(("ffn_matrices",), "2 (plain) or 3 (gated)", f"{self.ffn_matrices}")
        together = (
            ("kv_latent", "rope"),
            ("q_latent", "kv_latent"),
            ("heads_travel", "kv_latent"),
            ("convolution", "linear"),
            ("experts", "active_experts"),
            ("active_experts", "experts"),
            ("shared_d_ff", "experts"),
        )
        for one, other in together:
            if getattr(self, one) and not getattr(self, other):
                raise BadValue((one,), f"a kind that also has {other}", f"{getattr(self, one)}")
        if self.experts and self.active_experts and self.active_experts > self.experts:
            raise BadValue(("active_experts",), f"at most {self.experts}", f"{self.active_experts}")
        mixers = [name for name in ("window", "kv_latent", "linear") if getattr(self, name)]
        if len(mixers) > 1:
            raise BadValue((mixers[0],), f"a kind without {mixers[1]}", f"{getattr(self, mixers[0])}")


@dataclass(frozen=True, kw_only=True)
class Layer(Kind):
    """One kind of layer of a model of width d_model, with every size filled in."""

    d_model: int
    H: int
    K: int
    D: int
    d_ff: int
    ffn_matrices: int

    @property
    def value_dim(self) -> int:
        """Return the head dim of v."""
        return self.D if self.Dv is None else self.Dv

    @property
    def latent(self) -> int:
        """Return how many numbers of a token are cached and sent in place of K and V; 0 if K and V themselves are."""
        return 0 if self.heads_travel else self.latent_numbers

    @property
    def latent_numbers(self) -> int:
        """Return from how many numbers of a token K and V are made; 0 without a latent."""
        return self.kv_latent + (self.rope or 0) if self.kv_latent else 0

    @property
    def global_attention(self) -> bool:
        """Return whether a token attends to all tokens before it."""
        return not self.linear and self.window is None

    @property
    def dealt_heads(self) -> int:
        """Return the number of heads by which ranks divide K and V: K, or H if K and V are made from a latent."""
        return self.H if self.kv_latent else self.K

    def kv_copies(self, ranks: int) -> int:
        """Return the number of ranks that hold each K/V head, if `ranks` ranks share the heads."""
        return max(1, ranks // self.dealt_heads)

    @property
    def mixer_parameters(self) -> int:
        """Return the number of weights in attention's matrices, or in the gated delta rule and its convolution."""
        return self.rank_mixer_parameters(1)

    def rank_mixer_parameters(self, tp: int) -> int:
        """Return the weights of attention's matrices on one of `tp` ranks.

        A rank has whole K/V heads, and the whole matrices that make latents, which have no heads.
        """
        d, values, kv_heads = self.d_model, self.H * self.value_dim, self.K * self.kv_copies(tp)
        if self.linear:
            mixed = 2 * kv_heads * self.D + values
            split = d * (mixed + values + 2 * self.H) + (self.convolution or 0) * mixed + values * d
            return -(-split // tp)
        queries = self.H * self.D * (2 if self.output_gate else 1)
        if not self.kv_latent:
            return -(-d * (queries + kv_heads * (self.D + self.value_dim) + values) // tp)
        # Keys without their common part, and values.
        made = self.kv_latent * self.H * (self.D - (self.rope or 0) + self.value_dim)
        whole = d * (self.latent_numbers + (self.q_latent or 0))
        return whole - (-(queries * (self.q_latent or d) + made + values * d) // tp)

    @property
    def expert_parameters(self) -> int:
        """Return the weights of all experts; 0 without experts."""
        return (self.experts or 0) * self.ffn_matrices * self.d_model * self.d_ff

    @property
    def common_parameters(self) -> int:
        """Return the weights of the matrices that every token takes: all but the experts."""
        return self.rank_common_parameters(1)

    def rank_common_parameters(self, tp: int) -> int:
        """Return the weights on one of `tp` ranks of the matrices that every token takes; routers are whole on each."""
        shared = self.ffn_matrices * self.d_model * (self.shared_d_ff or 0)
        plain = 0 if self.experts else self.ffn_matrices * self.d_model * self.d_ff
        router = self.d_model * (self.experts or 0)
        return self.rank_mixer_parameters(tp) - (-(plain + shared) // tp) + router

    @property
    def matrix_parameters(self) -> int:
        """Return the weights of one layer's matrices."""
        return self.common_parameters + self.expert_parameters

    def gathered_parameters(self, fsdp: int, ep: int, tp: int = 1) -> int:
        """Return the weights of a layer that FSDP gathers on one of `tp` ranks of `ep`-fold expert parallelism."""
        experts = self.expert_parameters // ep if fsdp > ep or ep == 1 else 0
        return self.rank_common_parameters(tp) - (-experts // tp)

    @property
    def active_parameters(self) -> int:
        """Return the weights that one token is multiplied with."""
        return self.rank_active_parameters(1)

    def rank_active_parameters(self, tp: int) -> int:
        """Return the weights that one token is multiplied with on one of `tp` ranks."""
        experts = (self.active_experts or 0) * self.ffn_matrices * self.d_model * self.d_ff
        return self.rank_common_parameters(tp) - (-experts // tp)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of the feed-forwards, which tensor parallelism divides."""
        return (self.d_ff, *([self.shared_d_ff] if self.shared_d_ff else ()))

    def attention(self, B: int = 1, dtype: str = "bfloat16", causal: bool = True) -> Attention:
        """Return the sizes of the layer's attention."""
        return Attention(B, self.H, self.K, self.D, dtype, causal, self.Dv, self.latent or None)


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer with H query heads and K key/value heads of head dim D.

    ffn_matrices: the matrices of a feed-forward, 3 if it is gated (SwiGLU), 2 if it is plain. kind: the
    kinds of layers, if layers differ from each other or have more than attention and a feed-forward.
    Raises: CostError for sizes below one, if the K/V heads do not divide the query heads, or if the kinds do not
    add up to `layers`.

    >>> it = model("deepseek-v3")
    >>> [(layer.layers, layer.experts) for layer in it.kinds]
    [(3, None), (58, 256)]
    >>> round(it.parameters / 1e9), round(it.active_parameters / 1e9)
    (671, 37)
    """

    name: str
    title: str
    layers: int
    d_model: int
    H: int
    K: int
    D: int
    d_ff: int
    ffn_matrices: int
    vocabulary: int
    tied_embeddings: bool
    source: str
    kind: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        check_values(self)
        if self.ffn_matrices not in (2, 3):
            raise BadValue(("ffn_matrices",), "2 (plain) or 3 (gated)", f"{self.ffn_matrices}")
        if self.H % self.K:
            raise BadValue(("K",), f"a divisor of H = {self.H}", f"{self.K}")
        for it in self.kinds:
            if it.H % it.K:
                raise BadValue(("kind",), f"kinds with K = {it.K} that divides H = {it.H}", f"{it.K}")
        if sum(layer.layers for layer in self.kinds) != self.layers:
            counts = " + ".join(str(layer.layers) for layer in self.kinds)
            raise BadValue(("layers",), f"{counts}, the layers of all kinds", f"{self.layers}")

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """Return the kinds of layers, with every size filled in; a model whose layers are all alike has one."""
        return tuple(self._filled(each) for each in self.kind or (Kind(layers=self.layers),))

    def _filled(self, kind: Kind) -> Layer:
        given = {it.name: getattr(kind, it.name) for it in fields(kind)}
        sizes = {name: given[name] or getattr(self, name) for name in ("H", "K", "D", "d_ff", "ffn_matrices")}
        return Layer(**given | sizes | {"d_model": self.d_model})

    @property
    def main(self) -> Layer:
        """Return the kind of layer whose tokens attend to all tokens, or the first kind if none does."""
        return next((it for it in self.kinds if it.global_attention), self.kinds[0])

    @property
    def only(self) -> Layer:
        """Return the model's layer. Raises: CostError if the model describes its layers by kinds."""
        if self.kind:
            needed, remedy = (
                "a model whose layers are all alike, with attention to all tokens",
                "such as llama3-8b",
            )
            raise CostError(needed, f"{self.name}, whose layers are of several kinds", remedy)
        return self.kinds[0]

    @property
    def matrix_parameters(self) -> int:
        """Return the weights of all layers' matrices."""
        return sum(it.layers * it.matrix_parameters for it in self.kinds)

    @property
    def expert_parameters(self) -> int:
        """Return the weights of all layers' experts; 0 without experts."""
        return sum(it.layers * it.expert_parameters for it in self.kinds)

    @property
    def layer_matrix_parameters(self) -> int:
        """Return the weights of the largest layer's matrices, including those of all its experts."""
        return max(it.matrix_parameters for it in self.kinds)

    @property
    def parameters(self) -> int:
        """Return the number of weights: matrices, embeddings and norms, without biases and positions."""
        return self.rank_parameters(1) + self.expert_parameters

    def rank_parameters(self, tp: int) -> int:
        """Return the number of weights on one of `tp` ranks, without those of experts.

        Matrices that make latents, routers and norms are whole on every rank. K/V heads and words are not cut,
        so a rank may have more than its share of them.
        """
        matrices = sum(it.layers * it.rank_common_parameters(tp) for it in self.kinds)
        return matrices + self.rank_vocabulary_parameters(tp) + self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Return the weights of all norms of width d_model, which tensor parallelism does not divide."""
        return self.d_model * (2 * self.layers + 1)

    def rank_vocabulary_parameters(self, tp: int) -> int:
        """Return the weights of the embedding, and of the head if it is another matrix, on one of `tp` ranks."""
        return (1 if self.tied_embeddings else 2) * -(-self.vocabulary // tp) * self.d_model

    @property
    def active_parameters(self) -> int:
        """Return the weights that a token is multiplied with, including its experts' and the logits'."""
        return sum(it.layers * it.active_parameters for it in self.kinds) + self.vocabulary * self.d_model

    def attention(self, B: int = 1, dtype: str = "bfloat16", causal: bool = True) -> Attention:
        """Return the sizes of one attention layer of the model, one that attends to all tokens if there is any."""
        return self.main.attention(B, dtype, causal)


def model(name_or_file: str | Path) -> Model:
    """Return a built-in model by name, or from a file: "mine.toml", or "mine.toml:name" if the file has several models.

    Raises: CostError for an unknown name, with the nearest ones; for an invalid file, with the line.
    """
    return pick(name_or_file, "model", _built_in(), read_models)


def model_names() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return tuple(_built_in())


def read_models(path: str | Path) -> dict[str, Model]:
    """Return every model that a TOML file describes, by name. Raises: CostError with file, line and key."""
    return read_entries(path, lambda name, table: table.read(Model, name=name))


@lru_cache(maxsize=1)
def _built_in() -> dict[str, Model]:
    return read_models(TABLES / "models.toml")
