"""Checks of 14.step: gradient descent on a sequence divided among ranks, against one process in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e14_training.shard import IGNORE
from ringlab_course.exercises.e14_training.shard import truth as batch

Weights = dict[str, Tensor]
VOCABULARY, WIDTH, RATE = 7, 8, 0.5
WEIGHTS = ("embedding", "k", "out", "q", "v")
NAMES = ("loss", *(f"update of {name}" for name in WEIGHTS))
BOUND = 1e-5
"""The allowed relative error of the loss and of every update.

Roundings cause less than 1e-12 in float64. They cause less than 5e-6 in float32, where an update is the
difference of weights that are ten times as large.
"""


@dataclass(frozen=True)
class Problem:
    """Whole sequences, which of their predictions count, the weights, and the layout of tokens on ranks."""

    weights: Weights
    tokens: Tensor
    counts: Tensor
    layout: Layout
    text: str

    @property
    def owned(self) -> list[Tensor]:
        """Return the global positions of each rank's tokens."""
        every = (self.layout.positions(rank).tolist() for rank in range(self.layout.P))
        return [torch.tensor(own, dtype=torch.int64) for own in every]


def problem(
    rng: np.random.Generator, layout: Layout, *, rows: int = 2, share: float = 0.7, narrow: bool = False
) -> Problem:
    """Return a problem with random weights in float64, or float32 if `narrow`.

    At least one prediction counts.
    """
    dtype = torch.float32 if narrow else torch.float64
    shapes = {"embedding": (VOCABULARY, WIDTH), **dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))}
    weights = {
        name: torch.from_numpy(rng.standard_normal(shape) * 0.6).to(dtype) for name, shape in shapes.items()
    }
    tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (rows, layout.S)))
    counts = torch.from_numpy(rng.random((rows, layout.S)) < share)
    counts[:, 0] = True
    text = f"{layout.name}, S={layout.S}, P={layout.P}{', float32' if narrow else ''}"
    return Problem(weights, tokens, counts, layout, text)


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Return x (B, L, D) with the pair (x[i], x[i + D/2]) of each token rotated by position · 100^(−2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def truth(given: Problem) -> tuple[np.ndarray, ...]:
    """Return the loss and the updates of the weights, in the order of NAMES, from one process in float64."""
    weights = {name: x.double().clone().requires_grad_() for name, x in given.weights.items()}
    places = torch.arange(given.layout.S)
    x = weights["embedding"][given.tokens]
    q, k = (turn(x @ weights[name], places) for name in ("q", "k"))
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(places[:, None] < places, -torch.inf)
    logits = (x + scores.softmax(-1) @ (x @ weights["v"]) @ weights["out"]) @ weights["embedding"].mT
    _, labels, _ = batch(given.tokens, given.counts, places)
    loss = F.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = loss / max(1, int((labels != IGNORE).sum()))
    slopes = torch.autograd.grad(loss, [weights[name] for name in WEIGHTS])
    return loss.detach().numpy(), *(_flushed((-RATE * slope).numpy()) for slope in slopes)


def _flushed(update: np.ndarray) -> np.ndarray:
    """Return the update with 0 in place of entries below 1e-12, which are roundings in float64.

    The updates of q and k are such roundings if each token sees only itself.
    """
    return np.where(np.abs(update) < 1e-12, 0.0, update)


def _run(subject: Any, given: Problem) -> Any:
    P = given.layout.P
    keywords = {"tokens": given.tokens, "counts": given.counts, "owned": given.owned, "rate": RATE}
    return subject.run_ring(P, [given.weights] * P, **keywords)


def _read(answer: Any, given: Problem) -> tuple[np.ndarray, ...]:
    """Return the loss and the updates from a rank's answer.

    Raises: Failure if the answer has another form.
    """
    loss, weights = expect_tuple(answer, ("loss", "weights"))
    if not isinstance(weights, dict) or set(weights) != set(WEIGHTS):
        raise Failure(f"The weights should be a dict with the names {', '.join(WEIGHTS)}, as they came.")
    loss = np.asarray(loss) if isinstance(loss, float) else loss
    found = [expect_array(loss, (), name="the loss")]
    for name in WEIGHTS:
        before = given.weights[name]
        now = expect_array(weights[name], before.shape, name=f"the weight {name}", dtype=before.dtype)
        found.append(_flushed(now.astype(np.float64) - before.double().numpy()))
    return tuple(found)


def _answers(subject: Any, cases: Iterable[Problem]) -> Iterator[Answered]:
    for given in cases:
        yield from _of_run(_run(subject, given).results, given)


def _of_run(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    right = truth(given)
    for rank, answer in enumerate(results):
        text = f"{given.text}: rank {rank}"
        yield Answered(_read(answer, given), right, BOUND, names=NAMES, text=text)


def _verify(subject: Any, *cases: Problem) -> None:
    compare_all(_answers(subject, cases))


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(problem(rng, layouts.contiguous(S, P)) for S, P in ((3, 1), (6, 2), (9, 3))))


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(problem(rng, made) for made in (layouts.zigzag(12, 3), layouts.striped(9, 3))))


def _check_uneven(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on ragged shards, a rank without tokens, and a rank on which no token counts."""
    given = problem(rng, layouts.contiguous(6, 2))
    given.counts[:, :3], given.counts[:, 3:] = True, False
    _verify(subject, given, problem(rng, layouts.zigzag(7, 3)), problem(rng, layouts.contiguous(2, 3)))


def _check_float32(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, problem(rng, layouts.zigzag(24, 4), rows=3, narrow=True))


def _check_shared(subject: Any, rng: np.random.Generator) -> None:
    """Check that each rank sends its K and V to the others.

    A rank that computes the whole sequence need not do so.
    """
    for P in (2, 3):
        given = problem(rng, layouts.zigzag(12 * P, P))
        run = _run(subject, given)
        compare_all(_of_run(run.results, given))
        trace = run.trace
        for rank in range(P):
            needed = 2 * given.tokens.shape[0] * len(given.owned[rank]) * WIDTH * 8
            sent = sum(
                event.bytes_sent for event in trace.exchanges(rank) if any(len(s) == 3 for s in event.shapes)
            )
            if sent < needed:
                text = f"{given.text}: rank {rank} sends {sent:,} bytes of keys and values, its own are {needed:,}"
                raise STAGE.misconception("computes_everything").failure(text)


STAGE = Stage(
    id="14.step",
    function="training_step",
    title="The step",
    kind="ring",
    helpers=("shard_batch", "loss_share", "sum_gradients"),
    hints=(
        "On one process a step is five lines: labels, logits, loss, gradients, update. Which of them change if a rank has only "
        "some of the tokens?",
        "Use the three functions above, in order, with the decoder between the first two and torch.autograd.grad between the last "
        "two, on copies of the weights. Which of your numbers is still a share?",
        r"$w \leftarrow w - \eta \sum_r \nabla_w\,\mathrm{share}_r$, $\;\mathcal{L} = \sum_r \mathrm{share}_r$",
    ),
    misconceptions=misconceptions_of("14.step"),
    checks=(
        Check("values", 3, "visible", "loss and weights of one process, contiguous, P = 1, 2, 3", _check_values),
        Check("layouts", 2, "visible", "zig-zag and striped", _check_layouts),
        Check("uneven", 2, "visible", "ranks with nothing that counts, with fewer tokens, with none", _check_uneven),
        Check("float32", 1, "held-out", "float32 weights, four ranks", _check_float32),
        Check("shared", 2, "held-out", "the sequence is shared, not computed by every rank", _check_shared, kind="cost"),
    ),
)  # fmt: skip
