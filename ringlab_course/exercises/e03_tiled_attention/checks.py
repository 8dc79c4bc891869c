"""What exercise 03 verifies: values, precision, memory and work, each as a function that makes a check.

Values are checked on float64 inputs with the tolerance of float32: twice the error of the plainest
float32 implementation, so that no honest order of sums fails. Precision has checks of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringlab import oracle
from ringlab_course.checking.answers import (
    bound_from,
    compare_with,
    expect_array,
    expect_tuple,
    relative_error,
)
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Crashed, Failure, NotWritten
from ringlab_course.checking.growth import measured
from ringlab_course.exercises.e03_tiled_attention.texts import BACKWARD_MISTAKES, FORWARD_MISTAKES

if TYPE_CHECKING:
    from torch import Tensor

    from ringlab_course.checking.subject import Subject

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")


class Case(NamedTuple):
    """One input, small enough to be read: what its label says."""

    S: int
    tile: int
    D: int
    causal: bool = False
    B: int = 1
    H: int = 1
    scale: float = 0.6
    reach: float = 1.0

    @property
    def label(self) -> str:
        """The case in words, for the counterexample."""
        mask = "causal" if self.causal else "no mask"
        size = "" if self.B * self.H == 1 else f"B={self.B}, H={self.H}, "
        grown = "" if self.reach == 1 else f", queries {self.reach:g} times as long"
        return f"{size}S={self.S}, D={self.D}, tile={self.tile}, {mask}, scale={self.scale:g}{grown}"

    @property
    def how(self) -> dict[str, Any]:
        """The keywords of both functions."""
        return {"causal": self.causal, "scale": self.scale, "tile": self.tile}

    @property
    def tiles(self) -> int:
        """Tiles along one side."""
        return -(-self.S // self.tile)


def _tensors(case: Case, rng: np.random.Generator, count: int, dtype: str = "float64") -> list[Tensor]:
    import torch

    shape = (case.B, case.H, case.S, case.D)
    tensors = [torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, dtype)) for _ in range(count)]
    tensors[-3] = tensors[-3] * case.reach
    return tensors


def _plain(tensors: list[Tensor], state: tuple[Any, ...], case: Case) -> tuple[Tensor, ...]:
    """Return what the plainest implementation, all scores at once in float32, makes of the input."""
    import torch

    from ringlab.blocks import get_block
    from ringlab.blocks.protocol import BackwardRows

    block, how = get_block("naive", tensors[-1]), {"causal": case.causal, "scale": case.scale}
    narrow = [x.to(torch.float32) for x in tensors]
    if len(tensors) == 3:
        part = block.forward(*narrow, **how)
        return part.out, part.lse
    dout, q, k, v = narrow
    out, lse = (torch.from_numpy(x).float() for x in state)
    return block.backward(BackwardRows(dout, q, out, lse, (dout * out).sum(-1)), k, v, **how)


def _forward_truth(tensors: list[Tensor], case: Case) -> oracle.Result:
    return oracle.attention(*tensors, causal=case.causal, scale=case.scale)


def _backward_truth(tensors: list[Tensor], case: Case) -> oracle.Gradients:
    dout, *qkv = tensors
    return oracle.gradients(*qkv, dout, causal=case.causal, scale=case.scale)


def forward_values(subject: Subject, rng: np.random.Generator, cases: Iterable[Case]) -> None:
    """Compare (out, lse) with the oracle on each of the cases, the smallest first."""
    for case in cases:
        tensors = _tensors(case, rng, 3)
        truth = _forward_truth(tensors, case)
        compare_with(
            subject.call(*tensors, **case.how),
            truth,
            bound=bound_from(_plain(tensors, (), case), truth),
            misconceptions=FORWARD_MISTAKES,
            inputs=tensors,
            keywords=case.how,
            names=FORWARD,
            case=case.label,
        )


def backward_values(subject: Subject, rng: np.random.Generator, cases: Iterable[Case]) -> None:
    """Compare (dq, dk, dv) with the oracle on each of the cases, the smallest first."""
    import torch

    for case in cases:
        tensors = _tensors(case, rng, 4)
        state, truth = _forward_truth(tensors[1:], case), _backward_truth(tensors, case)
        inputs = (*tensors, *map(torch.from_numpy, state))
        compare_with(
            gradients_of(subject, *inputs, **case.how),
            truth,
            bound=bound_from(_plain(tensors, state, case), truth),
            misconceptions=BACKWARD_MISTAKES,
            inputs=inputs,
            keywords=case.how,
            names=BACKWARD,
            case=case.label,
        )


def gradients_of(subject: Subject, *inputs: Any, **how: Any) -> Any:
    """Return what the learner's backward answers; autograd, which cannot work here, gets its name."""
    try:
        return subject.call(*inputs, **how)
    except Crashed as crash:
        told = crash.counterexample.partition("RuntimeError: ")[2]
        if re.search(r"grad_fn|requires? grad|differentiated|inplace|in-place", told):
            raise _named(BACKWARD_MISTAKES, "calls_autograd").failure(crash.counterexample) from None
        raise


def on_cases(values: Any, *cases: Case) -> Any:
    """Return a check that compares values on these cases, given from the smallest to the largest."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        values(subject, rng, cases)

    return run


def mixed(values: Any) -> Any:
    """Return a check that compares values on random sizes, with several batches and heads."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        for causal in (False, True):
            S, tile, D = int(rng.integers(9, 40)), int(rng.integers(1, 12)), int(rng.integers(1, 9))
            values(subject, rng, [Case(S, tile, D, causal, B=2, H=3, scale=float(rng.uniform(0.2, 1.5)))])

    return run


def _named(mistakes: tuple[Misconception, ...], name: str) -> Misconception:
    return next(m for m in mistakes if m.name == name)


# Precision


def precision(mistakes: tuple[Misconception, ...], names: tuple[str, ...]) -> Any:
    """Return a check of the error in float32, and of a float32 state for bfloat16 inputs."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        for dtype in ("float32", "bfloat16"):
            _one_precision(subject, rng, Case(96, 8, 16, True, H=2, scale=0.25), dtype, mistakes, names)

    return run


def _one_precision(
    subject: Subject,
    rng: np.random.Generator,
    case: Case,
    dtype: str,
    mistakes: tuple[Misconception, ...],
    names: tuple[str, ...],
) -> None:
    import torch

    tensors = _tensors(case, rng, 3 if names == FORWARD else 4, dtype)
    state = _forward_truth(tensors[-3:], case)
    truth = state if names == FORWARD else _backward_truth(tensors, case)
    plain = _plain(tensors, state, case)
    # A row's state is rounded twice for each tile that it meets, once in out and once in lse.
    bound = bound_from(plain, truth) + 2 * case.tiles * torch.finfo(torch.float32).eps
    given = [torch.from_numpy(x).float() for x in state] if names == BACKWARD else []
    parts = expect_tuple(subject.call(*tensors, *given, **case.how), names)
    low = _named(mistakes, "low_precision")
    if dtype == "bfloat16" and any(str(getattr(x, "dtype", "")).endswith("bfloat16") for x in parts):
        raise low.failure(f"{case.label}, bfloat16 inputs: the result is bfloat16, should be float32")
    for name, part, right in zip(names, parts, truth, strict=True):
        error = relative_error(expect_array(part, right.shape, name=name), right)
        if error > bound:
            example = (
                f"{case.label}, {dtype} inputs: relative error of {name} {error:.1e}, allowed {bound:.1e}"
            )
            raise low.failure(example) if error < 0.1 else Failure(f"{name}: wrong values.", example)


# Memory


def memory_exponent(mistakes: tuple[Misconception, ...], count: int) -> Any:
    """Return a check that peak memory beyond the arguments grows like S¹, fitted over S."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        _right_first(subject, rng, count)
        growth = measured(
            (512, 1024, 2048), lambda S: _peak(subject, rng, Case(S, 256, 8, True), count), order=1
        )
        if growth.faster_than(1):
            raise _named(mistakes, "materialises").failure(str(growth))

    return run


def live_set(mistakes: tuple[Misconception, ...], count: int) -> Any:
    """Return a check that the peak is that of a few tiles and the results, not of a row of tiles.

    Allowed: four times the results and sixteen score tiles. A row of S / tile = 16 tiles, held as
    scores and as weights, is more.
    """

    def run(subject: Subject, rng: np.random.Generator) -> None:
        case = Case(4096, 256, 4, True)
        vectors = case.S * (case.D + 1 if count == 3 else 3 * case.D)
        _right_first(subject, rng, count)
        peak, allowed = _peak(subject, rng, case, count), 4 * (4 * vectors + 16 * case.tile**2)
        if peak > allowed:  # a second look: chance (an import, the collector) only ever adds
            peak = min(peak, _peak(subject, rng, case, count))
        if peak > allowed:
            example = f"{case.label}: peak {peak / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f} MiB"
            raise _named(mistakes, "row_of_tiles").failure(example)

    return run


def _peak(subject: Subject, rng: np.random.Generator, case: Case, count: int) -> int:
    """Return the peak bytes of one call in float32; at least those of the results, which must exist."""
    import torch

    tensors = _tensors(case, rng, count, "float32")
    if count == 4:  # any state will do: memory does not depend on values
        tensors += [torch.zeros_like(tensors[0]), torch.full_like(tensors[0][..., 0], 9.0)]
    called = subject.measure(*tensors, **case.how)
    names = FORWARD if count == 3 else BACKWARD
    shapes = {name: tensors[0].shape[: 3 if name == "lse" else 4] for name in names}
    parts = zip(names, expect_tuple(called.answer, names), strict=True)
    results = [expect_array(part, shapes[name], name=name).nbytes for name, part in parts]
    return max(called.peak_bytes, sum(results))


def _right_first(subject: Subject, rng: np.random.Generator, count: int) -> None:
    """Raise Failure where values are wrong: what does not compute the answer needs no memory for it."""
    values = forward_values if count == 3 else backward_values
    try:
        values(subject, rng, [Case(4, 2, 2)])
    except NotWritten:
        raise
    except Failure:
        raise Failure("memory counts once the values are right.") from None


# Work: a tile that is computed and then masked betrays itself, as weight 0 times NaN is NaN.


def forward_skips(subject: Subject, rng: np.random.Generator) -> None:
    """Queries before the poisoned keys must come out as if those keys did not exist."""
    case, clean = Case(6, 2, 2, True), 4
    q, k, v = _tensors(case, rng, 3)
    truth = _forward_truth([x[..., :clean, :] for x in (q, k, v)], case)
    k[..., clean:, :] = v[..., clean:, :] = float("nan")
    out, _ = expect_tuple(subject.call(q, k, v, **case.how), FORWARD)
    out = expect_array(out, q.shape, name="out")[..., :clean, :]
    _clean_of(out, truth.out, _named(FORWARD_MISTAKES, "computes_hidden_tiles"), case)


def backward_skips(subject: Subject, rng: np.random.Generator) -> None:
    """dq of queries before the poisoned keys must come out as if those keys did not exist."""
    import torch

    case, clean = Case(6, 2, 2, True), 4
    dout, q, k, v = _tensors(case, rng, 4)
    state = map(torch.from_numpy, _forward_truth([q, k, v], case))
    truth = _backward_truth([x[..., :clean, :] for x in (dout, q, k, v)], case)
    k[..., clean:, :] = v[..., clean:, :] = float("nan")
    dq, *_ = expect_tuple(gradients_of(subject, dout, q, k, v, *state, **case.how), BACKWARD)
    dq = expect_array(dq, q.shape, name="dq")[..., :clean, :]
    _clean_of(dq, truth.dq, _named(BACKWARD_MISTAKES, "computes_hidden_tiles"), case)


def _clean_of(got: np.ndarray, right: np.ndarray, mistake: Misconception, case: Case) -> None:
    example = f"{case.label}, keys and values 4 and 5 are NaN: queries 0 to 3 must not notice"
    if not np.isfinite(got).all():
        raise mistake.failure(example)
    if relative_error(got, right) > 1e-6:
        raise Failure("queries that see only earlier keys have wrong values.", example)
