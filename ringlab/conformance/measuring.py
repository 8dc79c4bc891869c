"""The true results of a run, and how far what was returned is from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from ringlab.conformance.runs import JOINT, Ran, Run, cotangent_of_lse, inputs, joint_of, sinks_of
from ringlab.conformance.tolerance import NAMES, Results, bounds, relative_error, score_rounding, truth

CHANCE = 1.5
"""By how much bounds are widened here, against luck: twice the plainest implementation's error is a bound on one result,
and a report holds M ≈ 400 results to such bounds.

Each error is the largest of N roundings, about σ √(2 ln N) for normal ones, and varies as maxima do, by Gumbel's
law with the scale σ / √(2 ln N): the unluckiest of M exceeds its typical value by the share ln M / (2 ln N). With
N = 1,500 entries of a result that is 0.41; a round 1.5 stands for 1.41. For the few entries of a short ragged run it would be
more, and there the floor of the bounds helps. Roundings are not quite normal, so the sweep over seeds is the proof: without
the factor ringlab's own ring failed in 2 of 50 (dv of seed 6 by 1.04 times its bound); `closest` in
benchmarks/results/conformance/seeds.json says how much of the widened bounds is ever used."""


@lru_cache(maxsize=256)  # all plain runs of a quick tier: a matrix of wrong rings computes each of them once
def expected(plain: Run) -> tuple[Results, dict[str, float]]:
    """Return the true results of `run.plain` and the bounds of their errors, widened by CHANCE."""
    return truth_of(plain)


def truth_of(
    plain: Run, factors: Float[np.ndarray, "B H S S"] | None = None
) -> tuple[Results, dict[str, float]]:
    """Return `expected` of a run whose weights are multiplied by dropout `factors`, (B, H, S, S)."""
    q, k, v, dout = inputs(plain)
    if plain.joint:
        k, v = (torch.cat(pair, dim=2) for pair in zip(joint_of(plain), (k, v), strict=True))
    scoring: dict[str, Any] = {
        "scale": plain.scale,
        "softcap": plain.softcap or None,
        "mask": plain.mask,
        "factors": factors,
    }
    scoring |= {"sinks": sinks_of(plain).double().numpy()} if plain.sinks else {}
    dlse = cotangent_of_lse(plain).double().numpy() if plain.dlse else None
    true = truth(q, k, v, dout, dlse=dlse, **scoring)
    limits = bounds(q, k, v, dout, dlse=dlse, true=true, **scoring)
    if plain.values != "normal" or plain.moved or plain.one_hot:  # a moved token has scores of some tens
        more = score_rounding(q, k, v, dout, dlse=dlse, true=true, **scoring)
        limits = {name: limits[name] + more[name] for name in NAMES}
    if plain.joint:
        true, limits = _without_joint(true, limits)
    return true, {name: CHANCE * limits[name] for name in NAMES}


def _without_joint(true: Results, limits: dict[str, float]) -> tuple[Results, dict[str, float]]:
    """Leave out the gradients of joint tokens; bounds of the others are relative to the largest of these."""
    own = true._replace(dk=true.dk[:, :, JOINT:], dv=true.dv[:, :, JOINT:])
    wider = {
        name: np.abs(getattr(true, name)).max() / np.abs(getattr(own, name)).max() for name in ("dk", "dv")
    }
    return own, {name: limit * float(wider.get(name, 1.0)) for name, limit in limits.items()}


@dataclass(frozen=True)
class Measured:
    """One result's error and its bound, both relative to the largest true value, and its place."""

    name: str
    error: float
    bound: float
    where: str
    run: Run

    @property
    def ok(self) -> bool:
        """Return whether the error is within its bound; NaN is not."""
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Return error / bound, 0 without an error."""
        return self.error / self.bound if self.error and self.bound else (0.0 if not self.error else np.inf)

    def __str__(self) -> str:
        relation = "within" if self.ok else "beyond"
        place = "" if self.ok else f", {self.where}"
        return f"{self.name} error {self.error:.2g} {relation} {self.bound:.2g}{place} ({self.run})"


def measure(ran: Ran, names: tuple[str, ...] = NAMES) -> list[Measured]:
    """Return the errors of the named results of the run, each with its bound."""
    return compare(ran, *expected(ran.run.plain), names)


def compare(
    ran: Ran, true: Results, limits: dict[str, float], names: tuple[str, ...] = NAMES
) -> list[Measured]:
    """Return the errors of the named results of the run against these true ones; rows of padding are not looked at."""
    found = []
    for name in names:
        if name in ran.arrays and not (
            name == "lse" and ran.run.sinks
        ):  # some count the sink in lse, some do not
            array, right = ran.arrays[name], getattr(true, name)
            if ran.run.pads and array.shape == right.shape and name in ("out", "lse", "dq"):
                array = np.where(ran.run.padding.reshape(-1, *[1] * (array.ndim - 3)), right, array)
            found.append(
                Measured(name, relative_error(array, right), limits[name], _place(array, right), ran.run)
            )
    return found


def _place(array: np.ndarray, right: np.ndarray) -> str:
    """The place of the largest error, in words: head, token, and both values."""
    if array.shape != right.shape:
        return f"shape {array.shape} for {right.shape}"
    with np.errstate(all="ignore"):
        wrong = np.abs(np.where(array == right, 0.0, array - right))
    wrong = np.where(np.isnan(wrong), np.inf, wrong)
    index = np.unravel_index(int(wrong.argmax()), wrong.shape)
    place = f"batch {index[0]}, head {index[1]}, token {index[2]}"
    return f"{place}: {float(array[index]):.6g} for {float(right[index]):.6g}"
