"""Checks of 20.chunk: linear attention with decay on one chunk, which updates the state that entered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_arrays
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("out", "state")
BOUND = 1e-9
"""The allowed relative error. Inputs are float64, and sums have some dozens of terms."""
Answer = tuple[np.ndarray, np.ndarray]


def truth(q: Any, k: Any, v: Any, decay: Any, state: Any) -> Answer:
    """Return (out, state) for inputs (H, L, ·), computed token by token."""
    q, k, v, g, S = (np.asarray(x, np.float64) for x in (q, k, v, decay, state))
    out = np.zeros(v.shape)
    for t in range(q.shape[1]):
        S = np.exp(g[:, t, None, None]) * S + k[:, t, :, None] * v[:, t, None, :]
        out[:, t] = (q[:, t, None, :] @ S)[:, 0]
    return out, S


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    rng: np.random.Generator,
    L: int,
    *,
    H: int = 2,
    D: int = 3,
    Dv: int = 2,
    decay: float = 0.5,
    empty: bool = False,
) -> Inputs:
    """Return q, k, v, decay and state in float64. Decays are drawn between −2 · `decay` and 0."""
    shapes = (H, L, D), (H, L, D), (H, L, Dv)
    q, k, v = (torch.from_numpy(rng.standard_normal(shape)) for shape in shapes)
    g = torch.from_numpy(-2 * decay * rng.random((H, L)))
    state = torch.from_numpy(rng.standard_normal((H, D, Dv)))
    return q, k, v, g, torch.zeros_like(state) if empty else state


def _answers(subject: Any, cases: Iterable[tuple[str, Inputs]]) -> Iterator[Answered]:
    for text, given in cases:
        right = truth(*given)
        got = expect_arrays(subject.call(*given), right, NAMES)
        text = f"{given[0].shape[1]} tokens, {text}"
        if any(not np.isfinite(x).all() for x in got):
            raise STAGE.misconception("divides_by_decays").failure(text)
        yield Answered(got, right, BOUND, names=NAMES, text=text)


def _verify(subject: Any, cases: Iterable[tuple[str, Inputs]]) -> None:
    compare_all(_answers(subject, cases))


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on chunks without decay and state, with one of the two, and with both."""
    _verify(
        subject,
        [
            ("no decay, no state", inputs(rng, 3, decay=0.0, empty=True)),
            ("no decay", inputs(rng, 2, decay=0.0)),
            ("no state", inputs(rng, 4, empty=True)),
            ("decay and state", inputs(rng, 5)),
            ("decay and state", inputs(rng, 33, D=8, Dv=5)),
        ],
    )


def _check_strong(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on strong decays with weak ones between them.

    Strong decays forget everything, and e to the power of minus their sum overflows.
    """
    cases: list[tuple[str, Inputs]] = []
    for L, strong, text in ((6, -400.0, "−400"), (40, -400.0, "−400"), (7, -np.inf, "−∞")):
        q, k, v, g, state = inputs(rng, L)
        g[:, int(rng.integers(2)) :: int(rng.integers(2, 4))] = strong - 10 * float(rng.random())
        cases.append((f"some decays of {text}", (q, k, v, g, state)))
    _verify(subject, cases)


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on chunks of no token and of one; three tokens tell mistakes apart."""
    _verify(subject, [("decay and state", inputs(rng, L)) for L in (0, 1, 3)])


STAGE = Stage(
    id="20.chunk",
    function="chunk",
    title="One chunk",
    hints=(
        "Of the value that token j has written, what has token i, later in the chunk, still got? Which decays lie between the two?",
        "Build a matrix (L, L) of the decays between each pair, with zeros above the diagonal: it weighs q·k within the chunk. "
        "The entering state needs a factor for each row, the leaving one a factor for each write. Take sums of logarithms of "
        "exactly the decays that are meant: a difference of two large sums, or a quotient of two products, has no digits left.",
        r"$E_{ij} = e^{g_{j+1} + \dots + g_i}$ for $j \le i$, $\;O = e^{g_1 + \dots + g_i}\,QS + (E \odot QK^\top) V$, "
        r"$\;S' = e^{g_1 + \dots + g_L} S + \sum_j e^{g_{j+1} + \dots + g_L} k_j v_j^\top$",
    ),
    misconceptions=misconceptions_of("20.chunk"),
    checks=(
        Check("values", 2, "visible", "outputs and the state, with and without decay", _check_values),
        Check("strong", 1, "visible", "decays that forget everything", _check_strong),
        Check("edges", 1, "held-out", "one token, and none", _check_edges),
    ),
)  # fmt: skip
