"""Checks of 20.transition: how a few tokens change any state under the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_arrays
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("A", "B")
BOUND = 1e-9
Answer = tuple[np.ndarray, np.ndarray]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def truth(k: Any, v: Any, decay: Any, beta: Any) -> Answer:
    """Return (A, B) for inputs (H, L, ·), so that the new state is S' = A S + B."""
    k, v, g, b = (np.asarray(x, np.float64) for x in (k, v, decay, beta))
    H, L, D = k.shape
    A, B = np.tile(np.eye(D), (H, 1, 1)), np.zeros((H, D, v.shape[-1]))
    for t in range(L):
        k_t, v_t, b_t = k[:, t, :, None], v[:, t, None, :], b[:, t, None, None]
        step = np.exp(g[:, t, None, None]) * (np.eye(D) - b_t * k_t * k_t.swapaxes(1, 2))
        A, B = step @ A, step @ B + b_t * k_t * v_t
    return A, B


def inputs(
    rng: np.random.Generator, L: int, *, H: int = 2, D: int = 3, Dv: int = 2, plain: bool = False
) -> Inputs:
    """Return k of length 1, v, decay and beta in float64. With `plain` there is no decay."""
    k, v = (torch.from_numpy(rng.standard_normal((H, L, n))) for n in (D, Dv))
    g = torch.from_numpy(-rng.random((H, L))) * (not plain)
    return k / k.norm(dim=-1, keepdim=True), v, g, torch.from_numpy(0.2 + 0.7 * rng.random((H, L)))


def _answers(subject: Any, cases: Iterable[tuple[str, Inputs]]) -> Iterator[Answered]:
    for text, given in cases:
        right = truth(*given)
        got = expect_arrays(subject.call(*given), right, NAMES)
        yield Answered(got, right, BOUND, names=NAMES, text=f"{given[0].shape[1]} tokens{text}")


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    cases = [(", no decay", inputs(rng, L, plain=True)) for L in (1, 2, 3)]
    compare_all(_answers(subject, [*cases, ("", inputs(rng, 3)), ("", inputs(rng, 20, D=5))]))


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """Check the transition of no token, which leaves states unchanged.

    Also check a decay of −∞, which removes the old state.
    """
    k, v, g, beta = inputs(rng, 4)
    g[:, 2] = -torch.inf
    H, D, Dv = (int(n) for n in rng.integers(1, 20, 3))
    none = inputs(rng, 0, H=H, D=D, Dv=Dv)
    compare_all(_answers(subject, [("", none), (", one decay of −∞", (k, v, g, beta))]))


STAGE = Stage(
    id="20.transition",
    function="transition",
    title="What tokens do to a state",
    hints=(
        "One token takes a state S to some matrix times S, plus another matrix. Which two are they? And what is the first of them if "
        "a second token follows?",
        "Begin with what leaves every state as it is, and go through the tokens: each multiplies both from the left by its own "
        "matrix, and adds its write to the second.",
        r"$S_t = M_t S_{t-1} + \beta_t k_t v_t^\top$ with $M_t = \alpha_t (I - \beta_t k_t k_t^\top)$; "
        r"$\;A \leftarrow M_t A$, $\;B \leftarrow M_t B + \beta_t k_t v_t^\top$, from $A = I$, $B = 0$",
    ),
    misconceptions=misconceptions_of("20.transition"),
    checks=(
        Check("values", 2, "visible", "one token and several, without decay and with it", _check_values),
        Check("edges", 1, "visible", "no token at all; a token that forgets everything", _check_edges),
    ),
)  # fmt: skip
