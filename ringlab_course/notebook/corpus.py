"""A corpus of real text that every machine has: the source of the Python standard library, as bytes.

The text differs a little between Python versions, so a notebook whose outputs are compared must not print
anything that depends on its details. It may print shapes, counts, bytes, rounds, and errors rounded to a
bound, but never a token, a value or a digest of the text. (The first line, the title of heapq, has been the
same since Python 2.3 and may be shown.)
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.errors import CourseError

FIRST = ("heapq", "bisect", "textwrap", "fractions", "statistics", "random", "argparse")
"""The modules that come first, as they are old and will stay; the others follow in alphabetical order."""
VOCABULARY, MODEL_DIM = 256, 128


def text(n: int) -> str:
    """Return about the first `n` bytes of the corpus as readable text."""
    return _bytes(n).decode("utf-8", errors="replace")


def tokens(n: int) -> Int[np.ndarray, "S"]:
    """Return the first `n` bytes of the corpus as token ids 0–255, int64.

    Raises: CourseError if the standard library has no source files here, or fewer than `n` bytes of them.
    """
    return np.frombuffer(_bytes(n), dtype=np.uint8).astype(np.int64)


def embedded(n: int, seed: int = 0) -> Float[np.ndarray, "S E"]:
    """Return the first `n` tokens as vectors of MODEL_DIM: a seeded embedding plus sinusoidal positions.

    The root mean square of each vector is 1.
    """
    table = np.random.default_rng(seed).standard_normal((VOCABULARY, MODEL_DIM))
    frequencies = 10_000.0 ** (-np.arange(MODEL_DIM // 2) / (MODEL_DIM // 2))
    angles = np.arange(n)[:, None] * frequencies
    x = table[tokens(n)] + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True))


def qkv(
    S: int, heads: int = 8, kv_heads: int | None = None, head_dim: int = 64, seed: int = 0
) -> tuple[Float[Tensor, "1 H S D"], Float[Tensor, "1 K S D"], Float[Tensor, "1 K S D"]]:
    """Return q, k and v of the corpus's first `S` tokens through one seeded layer, float32."""
    x = embedded(S, seed)
    rng = np.random.default_rng([seed, 1])

    def project(count: int) -> Tensor:
        weight = rng.standard_normal((MODEL_DIM, count * head_dim)) / np.sqrt(MODEL_DIM)
        y = (x @ weight).reshape(S, count, head_dim).transpose(1, 0, 2)
        return torch.from_numpy(np.ascontiguousarray(y[None], dtype=np.float32))

    return project(heads), project(kv_heads or heads), project(kv_heads or heads)


def _bytes(n: int) -> bytes:
    found = b""
    for path in _sources():
        if len(found) >= n:
            break
        found += path.read_bytes()
    if len(found) < n:
        place = sysconfig.get_path("stdlib")
        raise CourseError(
            f"{n} bytes of Python source in {place}", f"{len(found)}", "use a Python with its library"
        )
    return found[:n]


@lru_cache(maxsize=1)
def _sources() -> tuple[Path, ...]:
    """Return the library's modules: first those in FIRST, then the others in alphabetical order."""
    folder = Path(sysconfig.get_path("stdlib"))
    first = [folder / f"{name}.py" for name in FIRST]
    rest = sorted(path for path in folder.glob("*.py") if path not in first)
    return tuple(path for path in (*first, *rest) if path.is_file())
