"""Exercise 17 with inputs in bfloat16: how far a result may be off that is rounded once, and types on the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ringlab.conformance import tolerance
from ringlab.layout import zigzag
from ringlab_course.checking.answers import compare_with, relative_error
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure
from ringlab_course.exercises.e17_ring_in_jax.cases import ALL, FORWARD, Case, case, look
from ringlab_course.mesh.examine import Examined

L = 4
ROUNDING = float(torch.finfo(torch.bfloat16).eps) / 2
"""2⁻⁸: the most by which storing a number in bfloat16, 8 significant bits, moves it, relative to itself."""


def narrow_case(rng: np.random.Generator, P: int) -> Case:
    """Return a zig-zag problem with q, k, v and dout in bfloat16; its truth is made of the rounded numbers."""
    return case(rng, zigzag(L * P, P), dtype=torch.bfloat16)


def verify_narrow(
    subject: Any, given: Case, named: dict[str, Misconception], *, gradients: bool = False
) -> None:
    """Raise the Failure of results that have another type than they should, or were rounded more often than once."""
    found = look(subject, given, named, gradients=gradients)
    names = ALL if gradients else FORWARD
    _expect_types(found, names, given)
    truth = tuple(map(given.dealt, given.true[: len(names)]))
    # What is rounded at each of P stops is off by as much at most; more than that is another mistake.
    compare_with(found.results, truth, bound=given.ranks * ROUNDING, names=names, case=given.text)
    parts = {"q": given.q.float(), "k": given.k.float(), "v": given.v.float(), "dout": given.dout.float()}
    exact = replace(given, **parts).bound(gradients)
    for name, got, right in zip(names, found.results, truth, strict=True):
        if name in FORWARD and relative_error(got, right) > exact:
            told = f"{given.text}: {name} is off by {relative_error(got, right):.1e}, float32 by {exact:.1e} at most"
            raise named["rounds_on_the_way"].failure(told)
        if name not in FORWARD and (off := roundings(got, right, exact)) > tolerance.FACTOR:
            told = f"{given.text}: {name} is off by {off:.1f} roundings to bfloat16 in one of its numbers; rounded once, by 1"
            raise named["rounds_on_the_way"].failure(told)


def roundings(got: np.ndarray, right: np.ndarray, exact: float) -> float:
    """Return by how many roundings to bfloat16 the worst number is off, beyond what float32 may be.

    A program that computes g in float32 has ĝ, |ĝ − g| ≤ e = exact · max |g|, where `exact` is the bound of the same
    numbers as float32. Rounded once, at the end, it is off by 2⁻⁸ |ĝ| more: by 2⁻⁸ |g| + e in all, but for 2⁻⁸ e. So the result is
    1 at most, and FACTOR of it are allowed, as everywhere. A sum that is rounded on its way is off by 2⁻⁸ of what it was
    *there*: where terms cancel that is many times 2⁻⁸ |g|.
    """
    beyond = np.maximum(np.abs(got - right) - exact * np.abs(right).max(), 0)
    return float((beyond / np.maximum(ROUNDING * np.abs(right), np.finfo(np.float64).tiny)).max())


def _expect_types(found: Examined, names: tuple[str, ...], given: Case) -> None:
    """Raises: Failure where out or lse is not float32, or a gradient not of the type of q, k and v."""
    for name, dtype in zip(names, found.dtypes, strict=False):
        if name in FORWARD and dtype != "float32":
            raise Failure(f"{name} should be float32, whatever q is.", f"{given.text}: {dtype}")
        if name not in FORWARD and dtype != "bfloat16":
            raise Failure(
                f"{name} should have the type of q, k and v: round it once, at the very end.",
                f"{given.text}: {dtype}",
            )


def expect_told(found: Examined, given: Case) -> None:
    """Raises: Failure where numbers travel in a type that is neither bfloat16 nor float32, or nobody can say in which."""
    told = f"{given.text}: {', '.join(sorted(found.types)) or 'nothing'} on the wire"
    if found.untold:
        raise Failure(
            "A message stands in a lax.while_loop, and how many turns are its own cannot be read: what travels in which type is not known. Use lax.scan, or "
            "lax.fori_loop with numbers of Python.",
            told,
        )
    if any(not kind.startswith(("bfloat16", "float32", "int", "uint")) for kind in found.types):
        raise Failure(
            "Something travels in a type that is neither that of q, k and v nor float32. K and V travel as they came, gradients in float32.",
            told,
        )
