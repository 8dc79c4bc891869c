"""Transformer models as data: layers, widths and heads, each with its published source.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ringlab.cost.hardware import TABLES, pick, read_entries
from ringlab.cost.sizes import Attention
from ringlab.cost.toml_file import BadValue, check_values


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer: H query heads and K key/value heads of D, a feed-forward of `ffn_matrices`.

    ffn_matrices: 3 for gated feed-forwards (SwiGLU), 2 for plain ones.
    Raises: CostError for sizes below one, or if the K/V heads do not divide the query heads.
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

    def __post_init__(self) -> None:
        check_values(self)
        if self.ffn_matrices not in (2, 3):
            raise BadValue(("ffn_matrices",), "2 (plain) or 3 (gated)", f"{self.ffn_matrices}")
        if self.H % self.K:
            raise BadValue(("K",), f"a divisor of H = {self.H}", f"{self.K}")

    @property
    def layer_matrix_parameters(self) -> int:
        """Return the weights of one layer's matrices: Q, K, V, output, and the feed-forward."""
        attention = 2 * self.d_model * self.D * (self.H + self.K)
        return attention + self.ffn_matrices * self.d_model * self.d_ff

    @property
    def parameters(self) -> int:
        """Return the number of weights: matrices, embeddings and norms, without biases and positions."""
        norms = self.d_model * (2 * self.layers + 1)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocabulary * self.d_model
        return self.layers * self.layer_matrix_parameters + embeddings + norms

    def attention(self, B: int = 1, dtype: str = "bfloat16", causal: bool = True) -> Attention:
        """Return the sizes of one attention layer of the model."""
        return Attention(B=B, H=self.H, K=self.K, D=self.D, dtype=dtype, causal=causal)


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
