"""Checks of 20.layer: linear attention with the gated delta rule; each rank has one stretch of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

BOUND = 1e-8


@dataclass(frozen=True)
class Problem:
    """The tokens of all ranks in order, as lists with one (H, L, ·) per rank."""

    qs: list[torch.Tensor]
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]
    decays: list[torch.Tensor]
    betas: list[torch.Tensor]

    @property
    def lengths(self) -> list[int]:
        return [q.shape[1] for q in self.qs]

    @property
    def per_rank(self) -> tuple[list[torch.Tensor], ...]:
        return self.qs, self.ks, self.vs, self.decays, self.betas

    @property
    def text(self) -> str:
        return f"P={len(self.qs)}, {', '.join(map(str, self.lengths))} tokens on the ranks"

    def outs(self) -> list[np.ndarray]:
        """Return each rank's outputs, from one pass over all tokens that begins with a state of zeros."""
        state = np.zeros((*self.ks[0].shape[::2], self.vs[0].shape[-1]))
        found = []
        for own in zip(*self.per_rank, strict=True):
            q, k, v, g, b = (each.numpy() for each in own)
            out = np.zeros(v.shape)
            for t in range(q.shape[1]):
                q_t, k_t, v_t = (x[:, t, :, None] for x in (q, k, v))
                state = np.exp(g[:, t, None, None]) * state
                written = b[:, t, None, None] * (v_t - state.swapaxes(1, 2) @ k_t)
                state = state + k_t @ written.swapaxes(1, 2)
                out[:, t] = (state.swapaxes(1, 2) @ q_t)[..., 0]
            found.append(out)
        return found


def problem(rng: np.random.Generator, lengths: Sequence[int], H: int = 2, D: int = 3, Dv: int = 2) -> Problem:
    """Return random tokens in float64.

    Keys have length 1, and a decay forgets at most a tenth of the state.
    """

    def drawn(n: int) -> list[torch.Tensor]:
        return [torch.from_numpy(rng.standard_normal((H, L, n))) for L in lengths]

    ks = [k / k.norm(dim=-1, keepdim=True) for k in drawn(D)]
    decays = [torch.from_numpy(-0.1 * rng.random((H, L))) for L in lengths]
    betas = [torch.from_numpy(0.1 + 0.8 * rng.random((H, L))) for L in lengths]
    return Problem(drawn(D), ks, drawn(Dv), decays, betas)


def _answers(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    for rank, (answer, right) in enumerate(zip(results, given.outs(), strict=True)):
        got = expect_array(answer, right.shape, name="out")
        yield Answered((got,), (right,), BOUND, names=("out",), text=f"{given.text}: rank {rank}")


def _verify(subject: Any, *cases: Problem) -> None:
    ran = ((subject.run_ring(len(case.qs), *case.per_rank), case) for case in cases)
    compare_all((each for outcome, case in ran for each in _answers(outcome.results, case)))


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(problem(rng, [4] * P) for P in (1, 2, 3)), problem(rng, [3] * 4))


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on stretches of different lengths, some of them empty."""
    _verify(subject, problem(rng, [2, 5, 3]), problem(rng, [4, 0, 3]), problem(rng, [0, 1, 0, 2, 1], H=1))


SHORT, LONG = 2, 40


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank sends no more bytes for a long sequence than for a short one."""
    P, sent = 4, {}
    for length in (SHORT, LONG):
        given = problem(rng, [length] * P, H=2, D=4, Dv=4)
        outcome = subject.run_ring(P, *given.per_rank)
        compare_all(_answers(outcome.results, given))
        sent[length] = [outcome.trace.bytes_sent(rank) for rank in range(P)]
        if not sum(sent[length]):
            raise Failure("No rank can know the others' tokens without a message.", given.text)
    for rank, (short, long) in enumerate(zip(sent[SHORT], sent[LONG], strict=True)):
        if long > short:
            text = f"rank {rank} sent {short:,} bytes with {SHORT} tokens on each rank, {long:,} with {LONG}"
            raise STAGE.misconception("sends_its_tokens").failure(text)


STAGE = Stage(
    id="20.layer",
    function="ring_linear",
    title="The layer over ranks",
    kind="ring",
    helpers=("transition", "enter"),
    hints=(
        "Which two things can your rank compute from its own tokens before it has heard from anybody? Which of the two do the others "
        "need?",
        "Compute the transition of your own tokens, let `enter` turn the transitions of all ranks into the state that enters "
        "yours, and go through your tokens once more, from that state.",
        r"$(A_r, B_r) = \mathrm{transition}(k, v, g, \beta)$, $\;S = \mathrm{enter}(A_r, B_r)$, $\;O = \mathrm{recurrence}(q, k, v, g, \beta, S)$",
    ),
    misconceptions=misconceptions_of("20.layer"),
    checks=(
        Check("values", 2, "visible", "outputs of every rank, P = 1, 2, 3, 4", _check_values),
        Check("ragged", 1, "visible", "stretches of different lengths, and empty ones", _check_ragged),
        Check("bytes", 2, "visible", "bytes do not depend on the length of the sequence", _check_bytes, kind="cost"),
    ),
)  # fmt: skip
