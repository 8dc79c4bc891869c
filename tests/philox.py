"""Philox4x32-10 written again from the paper, in Python integers and NumPy: the draws that dropout must make.

Source: Salmon et al. 2011, doi 10.1145/2063384.2063405, section 3.3.

This module does not import hypothesis, because tests on GPUs need it and run without hypothesis.
"""

from __future__ import annotations

import numpy as np


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Return the four random words that one counter gives."""
    L0, R0, L1, R1 = counter
    k0, k1 = key
    for _ in range(10):
        (hi0, lo0), (hi1, lo1) = divmod(0xD2511F53 * L0, 2**32), divmod(0xCD9E8D57 * L1, 2**32)
        L0, R0, L1, R1 = hi1 ^ R0 ^ k0, lo1, hi0 ^ R1 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return L0, R0, L1, R1


def words_of_all(counters: np.ndarray, seed: int) -> np.ndarray:
    """Return the words of many counters; both are uint64 arrays of shape (…, 4)."""
    x0, x1, x2, x3 = np.moveaxis(counters.astype(np.uint64), -1, 0)
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = b >> half ^ x1 ^ np.uint64(k0), b & low, a >> half ^ x3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([x0, x1, x2, x3], -1)


def factors(B: int, H: int, S: int, rate: float, seed: int) -> np.ndarray:
    """Return the factors of the weights of all pairs, (B, H, S, S): each is 0 or 1/(1 − rate)."""
    b, group, i, j = np.meshgrid(
        np.arange(B), np.arange(-(-H // 4)), np.arange(S), np.arange(S), indexing="ij"
    )
    drawn = words_of_all(np.stack([j, i, b, group], -1), seed)
    by_head = np.moveaxis(drawn, -1, 2).reshape(B, -1, S, S)[:, :H]
    return (by_head >= np.uint64(round(rate * 2**32))) / (1 - rate)
