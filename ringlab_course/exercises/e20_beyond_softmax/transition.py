"""Checks of 20.transition: what some tokens do to any state, under the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("20.transition")

NAMES = ("A", "B")
BOUND = 1e-9
Answer = tuple[np.ndarray, np.ndarray]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class How:
    """How the tokens are put together; as it stands, rightly."""

    backwards: bool = False
    decays: bool = True
    decays_the_writes: bool = True
    erases: bool = True
    beta: bool = True
    corrects_the_writes: bool = True
    writes_with_beta: bool = True
    from_the_left: bool = True
    writes_fade: bool = True

    def __call__(self, k: Any, v: Any, decay: Any, beta: Any) -> Answer:
        """Return (A, B) with S' = A S + B for inputs (H, L, ·)."""
        k, v, g, b = (np.asarray(x, np.float64) for x in (k, v, decay, beta))
        H, L, D = k.shape
        A, B = np.tile(np.eye(D), (H, 1, 1)), np.zeros((H, D, v.shape[-1]))
        for t in range(L)[:: -1 if self.backwards else 1]:
            k_t, v_t = k[:, t, :, None], v[:, t, None, :]
            b_t, alpha = b[:, t, None, None], np.exp(g[:, t, None, None])
            erased = (b_t if self.beta else 1.0) * k_t * k_t.swapaxes(1, 2) if self.erases else 0.0
            step = (alpha if self.decays else 1.0) * (np.eye(D) - erased)
            kept = alpha if self.decays_the_writes else 1.0
            A = step @ A if self.from_the_left else A @ step
            B = (step if self.writes_fade else step / alpha) @ B if self.corrects_the_writes else kept * B
            B = B + (b_t if self.writes_with_beta else 1.0) * k_t * v_t
        return A, B


RIGHT = How()
MISTAKES = (
    mistake("from_the_last_token", How(backwards=True)),
    mistake("without_decay", How(decays=False, decays_the_writes=False)),
    mistake("erases_nothing", How(erases=False)),
    mistake("erases_without_beta", How(beta=False)),
    mistake("later_tokens_spare_the_writes", How(corrects_the_writes=False)),
    mistake("writes_without_beta", How(writes_with_beta=False)),
    mistake("multiplies_from_the_right", How(from_the_left=False)),
    mistake("leaves_the_writes_whole", How(writes_fade=False)),
)


def inputs(
    rng: np.random.Generator, L: int, *, H: int = 2, D: int = 3, Dv: int = 2, plain: bool = False
) -> Inputs:
    """Return k of length 1, v, decay and beta in float64; `plain`: no decay."""
    k, v = (torch.from_numpy(rng.standard_normal((H, L, n))) for n in (D, Dv))
    g = torch.from_numpy(-rng.random((H, L))) * (not plain)
    return k / k.norm(dim=-1, keepdim=True), v, g, torch.from_numpy(0.2 + 0.7 * rng.random((H, L)))


def _answers(subject: Any, cases: Iterable[tuple[str, Inputs]]) -> Iterator[Answered]:
    for text, given in cases:
        right = RIGHT(*given)
        parts = expect_tuple(subject.call(*given), NAMES)
        got = tuple(
            expect_array(part, x.shape, name=name) for name, part, x in zip(NAMES, parts, right, strict=True)
        )
        yield Answered(got, right, BOUND, given, NAMES, f"{given[0].shape[1]} tokens{text}")


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    cases = [(", no decay", inputs(rng, L, plain=True)) for L in (1, 2, 3)]
    compare_all(_answers(subject, [*cases, ("", inputs(rng, 3)), ("", inputs(rng, 20, D=5))]), MISTAKES)


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """No token leaves every state as it is; a decay of −inf leaves nothing of what was."""
    k, v, g, beta = inputs(rng, 4)
    g[:, 2] = -torch.inf
    H, D, Dv = (int(n) for n in rng.integers(1, 20, 3))
    none = inputs(rng, 0, H=H, D=D, Dv=Dv)
    compare_all(_answers(subject, [("", none), (", one decay of −∞", (k, v, g, beta))]), MISTAKES)


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
    misconceptions=MISTAKES,
    checks=(
        Check("values", 2, "visible", "one token and several, without decay and with it", _check_values),
        Check("edges", 1, "visible", "no token at all; a token that forgets everything", _check_edges),
    ),
)  # fmt: skip
