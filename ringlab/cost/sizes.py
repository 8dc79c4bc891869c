"""The sizes of one attention layer, and the bytes of a dtype."""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.cost.units import nearest, shown
from ringlab.errors import CostError

ELEMENT_BYTES = {"float8": 1, "float16": 2, "bfloat16": 2, "tf32": 4, "float32": 4, "float64": 8}
"""Bytes of an element in memory and on the wire, by dtype."""


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises: CostError for an unknown dtype."""
    if dtype not in ELEMENT_BYTES:
        raise CostError(
            f"one of the dtypes {', '.join(ELEMENT_BYTES)}", shown(dtype), nearest(dtype, ELEMENT_BYTES)
        )
    return ELEMENT_BYTES[dtype]


@dataclass(frozen=True)
class Attention:
    """One attention layer: B sequences, H query heads, K key/value heads, head dim D, and head dim Dv of v (None: D).

    latent: the numbers of a token that travel in place of its K and V in latent attention (MLA).

    Raises: CostError for sizes below one, an unknown dtype, or if K does not divide H.
    """

    B: int = 1
    H: int = 32
    K: int = 8
    D: int = 128
    dtype: str = "bfloat16"
    causal: bool = True
    Dv: int | None = None
    latent: int | None = None

    def __post_init__(self) -> None:
        for name in ("B", "H", "K", "D", "Dv", "latent"):
            value = getattr(self, name)
            if name in ("Dv", "latent") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CostError(f"{name} >= 1, an integer", f"{name}={value!r}")
        if self.H % self.K:
            raise CostError(
                "query heads H divisible by key/value heads K",
                f"H={self.H}, K={self.K}",
                "K is a divisor of H",
            )
        element_bytes(self.dtype)

    @property
    def value_dim(self) -> int:
        """Return the head dim of v and of the output."""
        return self.D if self.Dv is None else self.Dv

    @property
    def travelling(self) -> int:
        """Return the numbers of one token that are cached and travel: B·K·(D + Dv), or B times those of its latent."""
        return self.B * (self.latent or self.K * (self.D + self.value_dim))

    @property
    def block_bytes_per_token(self) -> int:
        """Return the bytes that K and V of one token take, or its latent: `travelling` times e."""
        return self.travelling * element_bytes(self.dtype)
