"""Checks of 10.accept: verdicts on the results of correct and faulty implementations, new for each seed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of
from ringlab_course.exercises.e10_numerics.error import relative_error
from ringlab_course.figures import error_curves
from ringlab_course.figures.error_curves import FAULTS, Program

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

mistake = mistakes_of("10.accept")

FACTOR = 2.0
"""The rule allows this many times the error of the plainest implementation."""


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √D) v with every tensor in q's dtype: the plainest implementation."""
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


def allowed_for(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return FACTOR times the relative error of the plainest implementation, but at least one rounding."""
    return max(FACTOR * error_of(naive(q, k, v), q, k, v), torch.finfo(q.dtype).eps)


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the relative error of `out` against the float64 oracle."""
    return relative_error(out, torch.from_numpy(error_curves.truth(q, k, v)))


LOOSE = 4.0
"""A faulty result is tried only if its error is at least this many times the allowed one, so that every fair rule rejects it."""
TIGHT = 1.6
"""An honest result is tried only if its error is at most this many times that of the plainest implementation."""
FAR = 8
"""The exercise says that a result is wrong if its error is this many times the plainest implementation's."""
ALLOWED = 4
"""Every result may be off by this many roundings."""


@dataclass(frozen=True)
class Candidate:
    """An output that the learner judges, with the inputs, a description, and whether it is honest."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    honest: bool
    what: str
    case: str

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.out, self.q, self.k, self.v


def candidates(q: Tensor, k: Tensor, v: Tensor, order: Tensor, case: str) -> Iterator[Candidate]:
    """Yield honest and faulty results for these inputs. All fair rules give the same verdict about each result.

    `order` permutes the keys.
    """
    allowed = allowed_for(q, k, v)
    floor = ALLOWED * torch.finfo(q.dtype).eps
    for honest, group in ((True, _honest(q, k, v, order)), (False, _faulty(q, k, v))):
        for what, out in group:
            error = error_of(out, q, k, v)
            fair = error <= TIGHT / FACTOR * allowed if honest else error >= LOOSE * max(allowed, floor)
            if fair:
                yield Candidate(out, q, k, v, honest, what, case)
    right, plainest = torch.from_numpy(error_curves.truth(q, k, v)), naive(q, k, v)
    far = (right + FAR * (plainest.double() - right)).to(q.dtype)
    if error_of(far, q, k, v) >= 1.2 * (3 * error_of(plainest, q, k, v) + torch.finfo(q.dtype).eps):
        yield Candidate(far, q, k, v, False, f"{FAR} times as far off as the plainest implementation", case)


def _honest(q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "the plainest implementation", naive(q, k, v)
    yield "the plainest implementation, keys in another order", naive(q, k[order], v[order])
    yield "PyTorch's own attention", scaled_dot_product_attention(*(x[None, None] for x in (q, k, v)))[0, 0]
    for P in (1, 4, 16):
        yield f"{P} blocks folded in float32", error_curves.run(Program(q.dtype), q, k, v, P).to(q.dtype)


def _faulty(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor]]:
    drop = len(k) // 8
    yield "the last eighth of the keys left out", naive(q, k[:-drop], v[:-drop])
    yield "an accumulator that is never rescaled", error_curves.run(FAULTS["no rescale"], q, k, v, 8)
    yield "zeros", torch.zeros_like(q)
    yield "1.5 times the right values", 1.5 * naive(q, k, v)
    if q.dtype == torch.float32:
        yield "1.00005 times the right values", 1.00005 * naive(q, k, v)
        for name in ("bf16 out", "bf16 lse", "bf16 accumulator"):
            yield f"float32 inputs, {name}", error_curves.run(FAULTS[name], q, k, v, 8)


def check_float32(subject: Subject, rng: np.random.Generator) -> None:
    """Try float32 inputs with plain scores, where bfloat16 somewhere on the way is a fault."""
    _judge(subject, rng, [("plain", torch.float32, 256, 32, 1.0), ("plain", torch.float32, 1024, 64, 1.0)])


def check_bf16(subject: Subject, rng: np.random.Generator) -> None:
    """Try bfloat16 inputs with plain scores, where rounding to bfloat16 is no fault."""
    _judge(subject, rng, [("plain", torch.bfloat16, 256, 32, 1.0), ("plain", torch.bfloat16, 1024, 64, 1.0)])


def check_units(subject: Subject, rng: np.random.Generator) -> None:
    """Try v that is a thousand times smaller or larger."""
    _judge(
        subject,
        rng,
        [
            ("plain", dtype, 256, 32, size)
            for dtype in (torch.float32, torch.bfloat16)
            for size in (1e-3, 1e3)
        ],
    )


def check_nan(subject: Subject, rng: np.random.Generator) -> None:
    """Try a right result, and the same result with one NaN or one infinity."""
    found = list(_drawn(rng, "plain", torch.float32, 128, 32, 1.0))
    good = next(c for c in found if c.honest)
    broken = []
    for value in (math.nan, math.inf):
        out = good.out.clone()
        out[1, 2] = value
        broken.append(Candidate(out, *good.inputs[1:], False, f"one {value} in the right values", good.case))
    _verdicts(subject, [good, *broken])


def check_scores(subject: Subject, rng: np.random.Generator) -> None:
    """Try large scores, and scores that rise along the keys."""
    _judge(
        subject,
        rng,
        [
            (probe, dtype, 512, 32, 1.0)
            for probe in ("large", "sloped")
            for dtype in (torch.bfloat16, torch.float32)
        ],
    )


def check_luck(subject: Subject, rng: np.random.Generator) -> None:
    """Try honest results that are off by a rounding where the plainest implementation happens to be exact."""
    tried: list[Candidate] = []
    while len(tried) < 6:
        q, k, v = (torch.from_numpy(rng.standard_normal((n, 1))).float() for n in (1, 16, 16))
        nearly = 0.02 * torch.finfo(q.dtype).eps
        if error_of(naive(q, k, v), q, k, v) > nearly:
            continue
        for what, out in _honest(q, k, v, torch.from_numpy(rng.permutation(len(k)))):
            if 4 * nearly < error_of(out, q, k, v) <= 0.9 * torch.finfo(q.dtype).eps:
                tried.append(Candidate(out, q, k, v, True, what, "float32, 1 query, 16 keys, D=1"))
    _verdicts(subject, tried)


def check_any(subject: Subject, rng: np.random.Generator) -> None:
    """Try other lengths, head dims, dtypes and sizes."""
    cases = []
    for probe in ("plain", "large", "sloped"):
        S, D = int(rng.integers(200, 900)), int(rng.choice([16, 48, 80]))
        for dtype in (torch.float16, torch.float32, torch.bfloat16):
            cases.append((probe, dtype, S, D, float(np.exp(rng.uniform(-3, 3)))))
    _judge(subject, rng, cases)


def _judge(subject: Subject, rng: np.random.Generator, cases: list[tuple[Any, ...]]) -> None:
    _verdicts(subject, [candidate for case in cases for candidate in _drawn(rng, *case)])


def _drawn(
    rng: np.random.Generator, probe: str, dtype: torch.dtype, S: int, D: int, size: float
) -> tuple[Candidate, ...]:
    seed = int(rng.integers(2**31))
    return _computed(seed, rng.permutation(S).tobytes(), probe, dtype, S, D, size)


@functools.lru_cache(maxsize=48)  # all learners of a class get the same candidates
def _computed(
    seed: int, order: bytes, probe: str, dtype: torch.dtype, S: int, D: int, size: float
) -> tuple[Candidate, ...]:
    q, k, v = error_curves.inputs(probe, seed, rows=16, S=S, D=D)
    q, k, v = (x.to(dtype) for x in (q, k, size * v))
    case = f"{probe} scores, {str(dtype)[6:]}, S={S}, D={D}, v of size {size:.1g}"
    return tuple(candidates(q, k, v, torch.frombuffer(bytearray(order), dtype=torch.int64), case))


def _verdicts(subject: Subject, tried: list[Candidate]) -> None:
    got = [_verdict(subject.call(*candidate.inputs)) for candidate in tried]
    wrong = [c for c, verdict in zip(tried, got, strict=True) if verdict != c.honest]
    if not wrong:
        return
    first = min(wrong, key=lambda c: c.k.numel())
    example = (
        f"{first.case}: {'rejected' if first.honest else 'accepted'}, although it is {first.what}\n"
        f"relative error {error_of(*first.inputs):.1e}, the plainest has {error_of(naive(*first.inputs[1:]), *first.inputs[1:]):.1e}"
    )
    both = len({c.honest for c in wrong}) == 2
    failure = Failure(
        "Right results are rejected and wrong ones accepted."
        if both
        else "A right result is rejected: the tolerance is too narrow for these inputs."
        if first.honest
        else "A wrong result is accepted: the tolerance is too wide for these inputs.",
        example,
    )
    if name := _kind(subject, tried, got):
        failure.otherwise = mistake(name).failure(example)
    raise failure


def _kind(subject: Subject, tried: list[Candidate], got: list[bool]) -> str | None:
    """Return the known kind of mistake that the learner's verdicts on further candidates show, or None.

    A rule can show a known kind of mistake without being equal to any mistake of the stage. If several kinds
    fit, the first is returned. So the mistake of a rule that is wrong only on NaN and infinities is that it leaves
    them out, even if its tolerance is also too wide.
    """
    gallery = _gallery()
    verdicts = [_verdict(subject.call(*c.inputs)) for c in gallery]
    wrong = [c for c, verdict in zip(tried, got, strict=True) if verdict != c.honest]
    if not any(torch.isfinite(c.out).all() for c in wrong):
        return "not_finite_left_out"
    q, k, v = (x.bfloat16() for x in error_curves.inputs("large", 0, rows=16, S=256, D=32))
    exact = torch.from_numpy(error_curves.truth(q, k, v)).bfloat16()
    if _verdict(subject.call(naive(q, k, v), q, k, v)) and not _verdict(subject.call(exact, q, k, v)):
        return "truth_in_the_same_dtype"
    q, k, v = error_curves.inputs("plain", 0, rows=4, S=64, D=8)
    small, large = (_verdict(subject.call(0 * q, q, k, unit * v)) for unit in (1e-6, 1e2))
    if small and not large:
        return "atol_1e-2"
    judged = zip((*tried, *gallery), (*got, *verdicts), strict=True)
    return None if any(c.honest and not verdict for c, verdict in judged) else "too_wide"


@functools.cache
def _gallery() -> tuple[Candidate, ...]:
    """Return candidates of every kind, always the same ones; they serve only to tell mistakes apart."""
    rng = np.random.default_rng(0)
    kinds = [(probe, dtype) for probe in ("plain", "large") for dtype in (torch.float32, torch.bfloat16)]
    cases = [
        (*kind, S, 32, size)
        for kind in kinds
        for S, size in ((128, 1.0), (640, 1.0), (128, 1e-3), (128, 1e3))
    ]
    found = [candidate for case in cases for candidate in _drawn(rng, *case)]
    broken = found[0].out.clone()
    broken[0, 0] = math.nan
    return (*found, Candidate(broken, *found[0].inputs[1:], False, "a NaN", ""))


def _verdict(answer: Any) -> bool:
    """Return the learner's verdict. Raises: Failure unless it is True or False."""
    if answer is None:
        raise Failure("The verdict is None: is the `return` missing?")
    value = answer.item() if hasattr(answer, "item") and getattr(answer, "shape", None) == () else answer
    if not isinstance(value, (bool, np.bool_)):
        raise Failure(f"The verdict should be True or False, but is a {type(answer).__name__}.")
    return bool(value)


STAGE = Stage(
    id="10.accept",
    function="accept",
    title="Choose a tolerance: accept what is honest, reject what is wrong",
    helpers=("relative_error",),
    hints=(
        "How far off is an implementation without a mistake, in this dtype, on these very inputs? How could you find out?",
        "Write the plainest attention in the dtype of q and measure its error against the oracle. Allow a small multiple of it.",
        "$\\varepsilon(\\mathrm{out}) \\le \\max\\left(2\\,\\varepsilon(\\mathrm{plainest}),\\ \\mathrm{eps}\\right)$",
    ),
    misconceptions=misconceptions_of("10.accept"),
    checks=(
        Check("float32", 2, "visible", "float32 inputs: bfloat16 on the way is a fault", check_float32),
        Check("bf16", 2, "visible", "bfloat16 inputs: there it is no fault", check_bf16),
        Check("units", 1, "visible", "v a thousand times smaller, or larger", check_units),
        Check("not_finite", 1, "visible", "a NaN or an infinity is never right", check_nan),
        Check("luck", 1, "visible", "inputs on which the plainest is right by luck", check_luck),
        Check("scores", 2, "visible", "large scores, and scores that rise", check_scores),
        Check("any", 1, "held-out", "other lengths, dtypes and sizes", check_any),
    ),
)  # fmt: skip
