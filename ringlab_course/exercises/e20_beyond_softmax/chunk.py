"""Checks of 20.chunk: linear attention of one chunk with decay, from the state that enters to the state that leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("20.chunk")

NAMES = ("out", "state")
BOUND = 1e-9
"""Relative: inputs are float64, sums have some dozens of terms."""
Answer = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class How:
    """How a chunk is computed; as it stands, rightly. Each field is a place where one can go wrong."""

    enters: bool = True
    decays_the_entering: bool = True
    own_token: bool = True
    after: int = 0
    """A token's write is left with the decays of the tokens after it; −1: also its own; 1: without the reader's."""
    future: bool = False
    decays_the_writes: bool = True
    keeps_the_old: bool = True
    scale: bool = False
    transposed: bool = False

    def __call__(self, q: Any, k: Any, v: Any, decay: Any, state: Any) -> Answer:
        """Return (out, state) of inputs (H, L, ·)."""
        q, k, v, g, S = (np.asarray(x, np.float64) for x in (q, k, v, decay, state))
        L = q.shape[1]
        between = np.zeros((g.shape[0], L, L))
        for i in range(L):
            for j in range(L if self.future else i + 1):
                low, high = sorted((i, j))
                between[:, i, j] = np.exp(g[:, low + (self.after >= 0) : high + (self.after <= 0)].sum(1))
        if not self.own_token:
            between *= np.tri(L, L, -1)
        since = np.exp(np.cumsum(g, axis=1))[..., None]
        whole = since[:, -1:] if L else np.ones((g.shape[0], 1, 1))
        S = S if self.enters else np.zeros_like(S)
        left = np.exp(np.array([g[:, j + 1 :].sum(1) for j in range(L)]).reshape(L, len(g))).T[..., None]
        if not self.decays_the_writes:
            left = np.ones_like(left)
        out = (since if self.decays_the_entering else 1.0) * (q @ S)
        out = out + (between * (q @ k.swapaxes(1, 2))) @ v
        new = (left * k).swapaxes(1, 2) @ v + (whole * S if self.keeps_the_old else 0.0)
        return out * (q.shape[-1] ** -0.5 if self.scale else 1.0), new


RIGHT = How()
MISTAKES = (
    mistake("ignores_the_entering_state", How(enters=False)),
    mistake("reads_an_undecayed_state", How(decays_the_entering=False)),
    mistake("misses_its_own_token", How(own_token=False)),
    mistake("decays_its_own_write", How(after=-1)),
    mistake("reads_before_it_decays", How(after=1)),
    mistake("sees_the_future", How(future=True)),
    mistake("undecayed_writes", How(decays_the_writes=False)),
    mistake("forgets_the_old_state", How(keeps_the_old=False)),
    mistake("scales", How(scale=True)),
    mistake("divides_by_decays"),
)
NAMED = {each.name: each for each in MISTAKES}
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
    """Return q, k, v, decay and state in float64; decays are drawn between −2 · `decay` and 0."""
    shapes = (H, L, D), (H, L, D), (H, L, Dv)
    q, k, v = (torch.from_numpy(rng.standard_normal(shape)) for shape in shapes)
    g = torch.from_numpy(-2 * decay * rng.random((H, L)))
    state = torch.from_numpy(rng.standard_normal((H, D, Dv)))
    return q, k, v, g, torch.zeros_like(state) if empty else state


def _answers(subject: Any, cases: Iterable[tuple[str, Inputs]]) -> Iterator[Answered]:
    for text, given in cases:
        right = RIGHT(*given)
        parts = expect_tuple(subject.call(*given), NAMES)
        got = tuple(
            expect_array(part, x.shape, name=name) for name, part, x in zip(NAMES, parts, right, strict=True)
        )
        text = f"{given[0].shape[1]} tokens, {text}"
        if any(not np.isfinite(x).all() for x in got):
            raise NAMED["divides_by_decays"].failure(text)
        yield Answered(got, right, BOUND, given, NAMES, text)


def _verify(subject: Any, cases: Iterable[tuple[str, Inputs]]) -> None:
    compare_all(_answers(subject, cases), MISTAKES)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    """No decay and no state first; then one after the other."""
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
    """Decays that forget everything, so that e to the negative sum overflows; weak ones between them."""
    cases: list[tuple[str, Inputs]] = []
    for L, strong, text in ((6, -400.0, "−400"), (40, -400.0, "−400"), (7, -np.inf, "−∞")):
        q, k, v, g, state = inputs(rng, L)
        g[:, int(rng.integers(2)) :: int(rng.integers(2, 4))] = strong - 10 * float(rng.random())
        cases.append((f"some decays of {text}", (q, k, v, g, state)))
    _verify(subject, cases)


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """No token, one token."""
    _verify(subject, [("decay and state", inputs(rng, L)) for L in (0, 1)])


Run = Callable[[Any, np.random.Generator], None]
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
    misconceptions=MISTAKES,
    checks=(
        Check("values", 2, "visible", "outputs and the state, with and without decay", _check_values),
        Check("strong", 1, "visible", "decays that forget everything", _check_strong),
        Check("edges", 1, "held-out", "one token, and none", _check_edges),
    ),
)  # fmt: skip
