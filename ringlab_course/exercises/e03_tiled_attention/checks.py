"""The checks of exercise 03: functions that make a check of values, precision, memory or work.

Values are checked on float64 inputs with the tolerance of float32: twice the error of the plainest float32
implementation, so that every honest order of sums passes. Separate checks measure precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringlab import oracle
from ringlab.errors import apart
from ringlab_course.checking.answers import (
    bound_from,
    compare_with,
    expect_array,
    expect_tuple,
    relative_error,
)
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, NotWritten
from ringlab_course.checking.growth import measured
from ringlab_course.checking.wrong_answers import mistakes_of

if TYPE_CHECKING:
    from torch import Tensor

    from ringlab_course.checking.subject import Measured, Subject

Run = Callable[["Subject", np.random.Generator], None]
FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
FIRST = "Memory and work count once the values are right."


class Case(NamedTuple):
    """The sizes and options of one input. Its label shows all of them."""

    M: int
    N: int
    tile: int
    D: int
    causal: bool = False
    H: int = 1
    K: int = 1
    B: int = 1
    scale: float = 0.6
    reach: float = 1.0

    @property
    def label(self) -> str:
        """Return the case in words, for the counterexample."""
        mask = "causal" if self.causal else "no mask"
        size = "" if self.B * self.H == 1 else f"B={self.B}, H={self.H}, K={self.K}, "
        grown = "" if self.reach == 1 else f", queries {self.reach:g} times as long"
        shape = f"{size}M={self.M}, N={self.N}, D={self.D}, tile={self.tile}"
        return f"{shape}, {mask}, scale={self.scale:g}{grown}"

    @property
    def how(self) -> dict[str, Any]:
        """Return the keyword arguments of the forward and the backward."""
        return {"causal": self.causal, "scale": self.scale, "tile": self.tile}

    @property
    def mask(self) -> np.ndarray:
        """Return which query sees which key. The queries are the last M of N tokens."""
        seen = np.ones((self.M, self.N), bool)
        return np.tril(seen, self.N - self.M) if self.causal else seen

    @property
    def tiles(self) -> int:
        """Return the number of tiles in the longest sum of the case."""
        return -(-max(self.M, self.N) // self.tile)


class Pass(NamedTuple):
    """One pass, the forward or the backward, with its stage and the names of its results."""

    stage: str
    names: tuple[str, ...]

    @property
    def backward(self) -> bool:
        """Return whether the pass is the backward, which also takes dout and the forward's results."""
        return self.names == BACKWARD

    def named(self, name: str) -> Misconception:
        """Return the misconception called `name`."""
        return mistakes_of(self.stage)(name)


THERE, BACK = (
    Pass("03.forward", FORWARD),
    Pass("03.backward", BACKWARD),
)


class Input(NamedTuple):
    """The arguments of one call, the right answer, and its tolerance."""

    tensors: list[Tensor]
    truth: oracle.Result | oracle.Gradients
    bound: float


def drawn(which: Pass, case: Case, rng: np.random.Generator, dtype: str = "float64") -> Input:
    """Return the arguments of one call with the oracle's answer and its tolerance.

    In float32 the state of a row is rounded twice for each tile that the row meets, once in out and once in
    lse.
    """
    import torch

    of_queries, of_keys = (case.B, case.H, case.M, case.D), (case.B, case.K, case.N, case.D)
    shapes = (of_queries, of_keys, of_keys, *([of_queries] if which.backward else []))
    q, k, v, *dout = (torch.from_numpy(rng.standard_normal(s)).to(getattr(torch, dtype)) for s in shapes)
    q = q * case.reach
    how = {"mask": case.mask, "scale": case.scale}
    state = oracle.attention(q, k, v, **how)
    truth = oracle.gradients(q, k, v, *dout, **how) if dout else state
    plain = _plain([q, k, v, *dout], state, case)
    rounded = 0.0 if dtype == "float64" else 2 * case.tiles * torch.finfo(torch.float32).eps
    saved = [torch.from_numpy(x).to(torch.promote_types(q.dtype, torch.float32)) for x in state if dout]
    return Input([*dout, q, k, v, *saved], truth, bound_from(plain, truth) + rounded)


def _plain(tensors: list[Tensor], state: oracle.Result, case: Case) -> tuple[Tensor, ...]:
    """Return the results of the plainest implementation, which computes all scores at once in float32."""
    import torch

    q, k, v, *douts = (x.float() for x in tensors)
    q = q.unflatten(1, (case.K, -1))
    scores = case.scale * (q @ k.unsqueeze(2).mT)
    scores = scores.masked_fill(~torch.from_numpy(case.mask), -torch.inf)
    if not douts:
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ v.unsqueeze(2)
        return out.flatten(1, 2), lse.flatten(1, 2)
    dout, out, lse = (x.float().unflatten(1, (case.K, -1)) for x in (*douts, *map(torch.from_numpy, state)))
    weights = torch.exp(scores - lse.unsqueeze(-1))
    dscores = weights * (dout @ v.unsqueeze(2).mT - (dout * out).sum(-1, keepdim=True))
    dq = case.scale * (dscores @ k.unsqueeze(2)).flatten(1, 2)
    return dq, case.scale * (dscores.mT @ q).sum(2), (weights.mT @ dout).sum(2)


def answered(which: Pass, call: Callable[..., Any], inputs: list[Tensor], case: Case) -> Any:
    """Return the answer of the learner's function.

    Raises: the failure "calls_autograd" if the function used autograd, which cannot work here.
    """
    try:
        return call(*inputs, **case.how)
    except Crashed as crash:
        told = crash.counterexample.partition("RuntimeError: ")[2]
        if which.backward and re.search(r"grad_fn|requires? grad|differentiated|inplace|in-place", told):
            raise which.named("calls_autograd").failure(crash.counterexample) from None
        raise


def values(which: Pass, *cases: Case) -> Run:
    """Return a check that compares values with the oracle's on these cases, which are in order of size."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        def all_cases() -> Iterator[Answered]:
            for case in cases:
                given = drawn(which, case, rng)
                answer = answered(which, subject.call, given.tensors, case)
                yield Answered(answer, given.truth, given.bound, names=which.names, text=case.label)

        compare_all(all_cases())

    return run


def mixed(which: Pass) -> Run:
    """Return a check that compares values with the oracle's on random sizes, batches and heads."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        cases = []
        for causal in (False, True):
            M, more, tile, D = (int(rng.integers(*span)) for span in ((9, 30), (1, 20), (1, 12), (1, 9)))
            scale = float(rng.uniform(0.2, 1.5))
            cases.append(Case(M, M + more, tile, D, causal, H=6, K=3 - causal, B=2, scale=scale))
        values(which, *cases)(subject, rng)

    return run


# Precision


def precision(which: Pass) -> Run:
    """Return a check of the errors for float32 inputs, and of a float32 state for bfloat16 inputs."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        for dtype in ("float32", "bfloat16"):
            _one_precision(which, subject, rng, Case(64, 96, 8, 16, True, H=4, K=2, scale=0.25), dtype)

    return run


def _one_precision(which: Pass, subject: Subject, rng: np.random.Generator, case: Case, dtype: str) -> None:
    given = drawn(which, case, rng, dtype)
    parts = expect_tuple(answered(which, subject.call, given.tensors, case), which.names)
    low = which.named("low_precision")
    if dtype == "bfloat16" and any(str(getattr(x, "dtype", "")).endswith("bfloat16") for x in parts):
        raise low.failure(f"{case.label}, bfloat16 inputs: the result is bfloat16, should be float32")
    for name, part, right in zip(which.names, parts, given.truth, strict=True):
        error = relative_error(expect_array(part, right.shape, name=name), right)
        if error > given.bound:
            off, most = apart(error, given.bound, digits=1, kind="e")
            example = f"{case.label}, {dtype} inputs: relative error of {name} {off}, allowed {most}"
            raise low.failure(example) if error < 0.1 else Failure(f"{name}: wrong values.", example)


# Memory


def memory_exponent(which: Pass) -> Run:
    """Return a check that peak memory beyond the arguments grows no faster than S, where S = M = N."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        _right_first(which, subject, rng, Case(4, 5, 2, 2))
        sizes, scores = (512, 1024, 2048), 2 * 4 * 2048**2
        growth = measured(
            sizes, lambda S: _peak(which, subject, rng, Case(S, S, 128, 8, True, H=2))[0], 1, scores
        )
        if growth.faster_than(1, scores):
            raise which.named("materialises").failure(str(growth))

    return run


LONG, TILE, HEADS, HEAD_DIM = 8_192, 64, 4, 16


def live_set(which: Pass) -> Run:
    """Return a check that peak memory is that of the results and a few tiles.

    The allowance is three times the results, plus twelve score tiles of all heads. A case of few queries and
    many keys reveals memory that grows with N: a row of tiles, or a copy of K and V for every query head. In
    the forward, its inputs are bfloat16, so it also reveals a copy of K and V in float32. A case of many
    queries and few keys reveals a column of tiles.
    """

    def run(subject: Subject, rng: np.random.Generator) -> None:
        _right_first(which, subject, rng, Case(4, 5, 2, 2))
        tile_bytes = 4 * HEADS * TILE**2
        for M, N in ((TILE, LONG), (LONG, TILE)):
            case = Case(M, N, TILE, HEAD_DIM, H=HEADS, scale=0.25)
            dtype = "bfloat16" if N > M and not which.backward else "float32"
            peak, results = _peak(which, subject, rng, case, dtype)
            allowed = 3 * results + 12 * tile_bytes
            # Measure again, because an import or the garbage collector may have added to the first peak.
            if peak > allowed:
                peak = min(peak, _peak(which, subject, rng, case, dtype)[0])
            if peak > allowed:
                scores = LONG // TILE * tile_bytes * (2 if which.backward else 1)
                row = "row_of_tiles" if peak > scores else "copies_keys"
                used, most = apart(peak / 2**20, allowed / 2**20, digits=1, kind="f")
                example = f"{case.label}, {dtype}: peak {used} MiB, allowed {most} MiB"
                raise which.named(row if N > M else "column_of_tiles").failure(example)

    return run


def _peak(
    which: Pass, subject: Subject, rng: np.random.Generator, case: Case, dtype: str = "float32"
) -> tuple[int, int]:
    """Return the peak bytes of one call, and the bytes of its results.

    The peak is never below the bytes of the results.

    Raises: Failure if the values of this call are wrong, because a function that computes nothing needs no
    memory.
    """
    given = drawn(which, case, rng, dtype)
    called: Measured = answered(which, subject.measure, given.tensors, case)
    try:
        compare_with(called.answer, given.truth, bound=given.bound, names=which.names, case=case.label)
    except Failure as wrong:
        raise Failure(FIRST, wrong.counterexample) from None
    results = sum(4 * part.size for part in given.truth)
    return max(called.peak_bytes, results), results


def _right_first(which: Pass, subject: Subject, rng: np.random.Generator, case: Case) -> None:
    """Raise Failure if values are wrong, because a function that computes nothing needs no memory for it."""
    try:
        values(which, case)(subject, rng)
    except NotWritten:
        raise
    except Failure:
        raise Failure(FIRST) from None


# Needless work is found by NaN in hidden tiles: 0 · NaN is NaN, so a tile that is computed and then masked
# makes the output NaN.


def skips(which: Pass) -> Run:
    """Return a check that NaN keys leave the results of all queries before them unchanged."""

    def run(subject: Subject, rng: np.random.Generator) -> None:
        case, rows, keys = Case(6, 9, 2, 2, True), 4, 8  # queries 0 to 3 see keys 0 to 6
        _right_first(which, subject, rng, case)
        given = drawn(which, case, rng)
        tensors = [x.clone() for x in given.tensors]
        for of_keys in tensors[2:4] if which.backward else tensors[1:3]:
            of_keys[..., keys:, :] = float("nan")
        got, *_ = expect_tuple(answered(which, subject.call, tensors, case), which.names)
        right = given.truth[0]
        got, right = (x[..., :rows, :] for x in (expect_array(got, right.shape, name=which.names[0]), right))
        example = f"{case.label}, key and value 8 are NaN: queries 0 to 3 must not notice"
        if not np.isfinite(got).all():
            raise which.named("computes_hidden_tiles").failure(example)
        if relative_error(got, right) > max(given.bound, 1e-6):
            raise Failure("queries that see only earlier keys have wrong values.", example)

    return run
