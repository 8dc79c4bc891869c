"""Inputs for the laws: seeded tensors of given shapes, and hypothesis strategies for the shapes.

Philox4x32-10 once more, in plain Python integers and NumPy, from the paper: what dropout must draw.

Source: Salmon et al. 2011, doi 10.1145/2063384.2063405, section 3.3.

A law is worth as much as what it refutes: every law is shown to hold for the real thing and to fail for a mutant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ringlab.layout import LAYOUTS as REGISTERED
from ringlab.layout import Layout, dealt


@dataclass(frozen=True)
class Shape:
    """B, H, K, Lq, Lk, D of an attention problem."""

    B: int
    H: int
    K: int
    Lq: int
    Lk: int
    D: int


def shapes(longest: int = 24, square: bool = False, fewest_keys: int = 1) -> st.SearchStrategy[Shape]:
    """Small problems with every number of heads per key/value head."""

    def build(B: int, K: int, group: int, Lq: int, Lk: int, D: int) -> Shape:
        return Shape(B, K * group, K, Lq, Lq if square else Lk, D)

    length = st.integers(1, longest)
    keys = st.integers(fewest_keys, longest)
    return st.builds(
        build,
        st.integers(1, 2),
        st.integers(1, 2),
        st.integers(1, 4),
        length,
        keys,
        st.sampled_from([1, 3, 8]),
    )


def tensors(
    shape: Shape, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and dout, normally distributed and rounded to `dtype`."""
    generator = np.random.default_rng(seed)
    rows, keys = (shape.B, shape.H, shape.Lq, shape.D), (shape.B, shape.K, shape.Lk, shape.D)
    q, k, v, dout = (
        torch.from_numpy(generator.standard_normal(s)).to(dtype) for s in (rows, keys, keys, rows)
    )
    return q, k, v, dout


SEEDS = st.integers(0, 2**16)
MAKERS: tuple[Callable[[int, int], Layout], ...] = (
    *REGISTERED.values(),
    lambda S, P: dealt(S, P, chunk=1, folded=True),
    lambda S, P: dealt(S, P, chunk=3),
    lambda S, P: dealt(S, P, chunk=5, folded=True),
)
LAYOUTS = st.builds(
    lambda make, S, P: make(S, P), st.sampled_from(MAKERS), st.integers(1, 24), st.integers(1, 5)
)


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Return the four words of one counter."""
    L0, R0, L1, R1 = counter
    k0, k1 = key
    for _ in range(10):
        (hi0, lo0), (hi1, lo1) = divmod(0xD2511F53 * L0, 2**32), divmod(0xCD9E8D57 * L1, 2**32)
        L0, R0, L1, R1 = hi1 ^ R0 ^ k0, lo1, hi0 ^ R1 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return L0, R0, L1, R1


def words_of_all(counters: np.ndarray, seed: int) -> np.ndarray:
    """Return the words of counters (…, 4), uint64 arrays."""
    x0, x1, x2, x3 = np.moveaxis(counters.astype(np.uint64), -1, 0)
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = b >> half ^ x1 ^ np.uint64(k0), b & low, a >> half ^ x3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([x0, x1, x2, x3], -1)


def factors(B: int, H: int, S: int, rate: float, seed: int) -> np.ndarray:
    """Return what the weights of all pairs are multiplied by, (B, H, S, S): 0, or 1/(1 − rate)."""
    b, group, i, j = np.meshgrid(
        np.arange(B), np.arange(-(-H // 4)), np.arange(S), np.arange(S), indexing="ij"
    )
    drawn = words_of_all(np.stack([j, i, b, group], -1), seed)
    by_head = np.moveaxis(drawn, -1, 2).reshape(B, -1, S, S)[:, :H]
    return (by_head >= np.uint64(round(rate * 2**32))) / (1 - rate)


def refute(law: Callable[..., None], real: Any, mutant: Any, examples: Iterable[tuple[Any, ...]]) -> None:
    """Fail unless `law(mutant, *example)` fails for one of the examples, where `law(real, *example)` holds.

    Only an AssertionError refutes: a mutant that crashes would be caught without the law.
    """
    for example in examples:
        law(real, *example)
        try:
            law(mutant, *example)
        except AssertionError:
            return
    raise AssertionError(f"{law.__name__} does not notice {getattr(mutant, '__name__', mutant)}")
