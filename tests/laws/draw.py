"""Inputs for the laws: seeded tensors of given shapes, and hypothesis strategies for the shapes.

A law is useful only if it can fail, so every law is shown to hold for the right code and to fail for a
mutant.
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
    """B, H, K, Lq, Lk, D of an attention problem, and Dv, the head dim of v, which is D if Dv is 0."""

    B: int
    H: int
    K: int
    Lq: int
    Lk: int
    D: int
    Dv: int = 0


def shapes(longest: int = 24, square: bool = False, fewest_keys: int = 1) -> st.SearchStrategy[Shape]:
    """Return a strategy for small problems, with any number of query heads per key/value head."""

    def build(B: int, K: int, group: int, Lq: int, Lk: int, D: int, Dv: int) -> Shape:
        return Shape(B, K * group, K, Lq, Lq if square else Lk, D, Dv)

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
        st.sampled_from([0, 2, 5]),
    )


def tensors(
    shape: Shape, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and dout, normally distributed and rounded to `dtype`."""
    generator = np.random.default_rng(seed)
    rows, keys, Dv = (shape.B, shape.H, shape.Lq), (shape.B, shape.K, shape.Lk), shape.Dv or shape.D
    sizes = (*rows, shape.D), (*keys, shape.D), (*keys, Dv), (*rows, Dv)
    q, k, v, dout = (torch.from_numpy(generator.standard_normal(s)).to(dtype) for s in sizes)
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


def refute(law: Callable[..., None], real: Any, mutant: Any, examples: Iterable[tuple[Any, ...]]) -> None:
    """Fail unless `law(mutant, *example)` fails for one of the examples, and `law(real, *example)` holds.

    Only an AssertionError counts as a failure, because a mutant that crashes would be noticed without the
    law.
    """
    for example in examples:
        law(real, *example)
        try:
            law(mutant, *example)
        except AssertionError:
            return
    raise AssertionError(f"{law.__name__} does not notice {getattr(mutant, '__name__', mutant)}")
