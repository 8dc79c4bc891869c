"""Exercise 10: `accept`, judged on both sides by correct and by faulty implementations that run afresh; its common mistakes."""

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

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.in_process import copied
from ringlab_course.figures import error_curves
from ringlab_course.figures.error_curves import FAULTS, Program

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

from collections.abc import Callable

from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e10_numerics import mistakes as plain

mistake = mistakes_of("10.accept")

FACTOR = 2.0
"""How many times the plainest implementation's error is allowed."""


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √D) v with every tensor in q's dtype: the plainest implementation."""
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


def allowed_for(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the relative error that the rule allows: FACTOR times the plainest's, and at least one rounding."""
    return max(FACTOR * error_of(naive(q, k, v), q, k, v), torch.finfo(q.dtype).eps)


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the relative error of `out` against the float64 oracle."""
    return plain.relative_error(out, torch.from_numpy(error_curves.truth(q, k, v)))


def _same_dtype_truth(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    right = naive(q, k, v)
    return plain.relative_error(out, right.double()) <= 4 * torch.finfo(q.dtype).eps


def _unscaled_yardstick(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    unscaled = torch.softmax(q @ k.T, -1) @ v
    return error_of(out, q, k, v) <= FACTOR * error_of(unscaled, q, k, v)


def _no_floor(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= FACTOR * error_of(naive(q, k, v), q, k, v)


def _eps_only(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= torch.finfo(q.dtype).eps


def _grows_with_length(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= len(k) * torch.finfo(q.dtype).eps


def _float32_yardstick(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= max(
        FACTOR * error_of(naive(q.float(), k.float(), v.float()), q, k, v), 1e-6
    )


def _bf16_yardstick(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    narrow = naive(q.bfloat16(), k.bfloat16(), v.bfloat16())
    return error_of(out, q, k, v) <= FACTOR * error_of(narrow, q, k, v)


def _allclose(atol: float, rtol: float) -> Callable[..., bool]:
    def imitate(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
        right = torch.from_numpy(error_curves.truth(q, k, v))
        return torch.allclose(out.double(), right, atol=atol, rtol=rtol)

    return imitate


def _fixed(bound: float) -> Callable[..., bool]:
    return lambda out, q, k, v: error_of(out, q, k, v) <= bound


def _blind_to_nan(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    right = torch.from_numpy(error_curves.truth(q, k, v))
    return not float((out.double() - right).norm() / right.norm()) > allowed_for(q, k, v)


ACCEPT = (
    mistake("blind_to_nan", _blind_to_nan),
    mistake("not_finite_left_out"),
    mistake("atol_1e-2", _allclose(1e-2, 1e-5)),
    mistake("atol_and_rtol", _allclose(1e-2, 1e-2)),
    mistake("atol_0_1", _allclose(0.1, 1e-5)),
    mistake("fixed_relative", _fixed(1e-2)),
    mistake("eps_only", _eps_only),
    mistake("grows_with_S", _grows_with_length),
    mistake("truth_in_the_same_dtype", _same_dtype_truth),
    mistake("yardstick_in_float32", _float32_yardstick),
    mistake("yardstick_in_bf16", _bf16_yardstick),
    mistake("yardstick_is_wrong", _unscaled_yardstick),
    mistake("no_floor", _no_floor),
    mistake("too_wide"),
    mistake("always", lambda out, q, k, v: True),
    mistake("never", lambda out, q, k, v: False),
)


LOOSE = 4.0
"""A faulty result counts only if it is off by this many times what the rule allows: no fair rule accepts it."""
TIGHT = 1.6
"""An honest result counts only if it is off by at most this many times the plainest's error."""
FAR = 8
"""So many times the plainest's error is wrong, says the exercise."""
ALLOWED = 4
"""Roundings that any result may be off by."""


@dataclass(frozen=True)
class Candidate:
    """An output that is to be judged, what it is, and whether it is honest."""

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
    """Yield honest and faulty results for these inputs, those on which every fair rule agrees; order: another of the keys."""
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
    """Float32, plain scores: bfloat16 somewhere on the way is a fault."""
    _judge(subject, rng, [("plain", torch.float32, 256, 32, 1.0), ("plain", torch.float32, 1024, 64, 1.0)])


def check_bf16(subject: Subject, rng: np.random.Generator) -> None:
    """Bfloat16, plain scores: it is no fault there."""
    _judge(subject, rng, [("plain", torch.bfloat16, 256, 32, 1.0), ("plain", torch.bfloat16, 1024, 64, 1.0)])


def check_units(subject: Subject, rng: np.random.Generator) -> None:
    """The same with v a thousand times smaller and larger."""
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
    """A NaN, and an infinity."""
    found = list(_drawn(rng, "plain", torch.float32, 128, 32, 1.0))
    good = next(c for c in found if c.honest)
    broken = []
    for value in (math.nan, math.inf):
        out = good.out.clone()
        out[1, 2] = value
        broken.append(Candidate(out, *good.inputs[1:], False, f"one {value} in the right values", good.case))
    _verdicts(subject, [good, *broken])


def check_scores(subject: Subject, rng: np.random.Generator) -> None:
    """Large scores, and scores that rise along the keys."""
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
    """The plainest is right to the last digit, another honest one is off by a rounding."""
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
    """Other lengths, head dims, dtypes and sizes."""
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


@functools.lru_cache(maxsize=48)  # everybody of a class is asked the same
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
    if mistake := _explanation(subject, tried, got, wrong):
        raise mistake.failure(example)
    both = len({c.honest for c in wrong}) == 2
    raise Failure(
        "Right results are rejected and wrong ones accepted."
        if both
        else "A right result is rejected: the tolerance is too narrow for these inputs."
        if first.honest
        else "A wrong result is accepted: the tolerance is too wide for these inputs.",
        example,
    )


def _explanation(
    subject: Subject, tried: list[Candidate], got: list[bool], wrong: list[Candidate]
) -> Misconception | None:
    """The mistake that gives these very verdicts, here and on a set of candidates of every kind.

    Where none does, a rule that fails on a NaN or an infinity alone leaves them out, however wide it is.
    """
    verdicts = tuple(_verdict(subject.call(*c.inputs)) for c in _gallery())
    for mistake in ACCEPT:
        imitate = mistake.imitate
        if (
            imitate
            and _imitated(mistake.name) == verdicts
            and [imitate(*copied(c.inputs)) for c in tried] == got
        ):
            return mistake
    if not any(torch.isfinite(c.out).all() for c in wrong):
        return _known("not_finite_left_out")
    q, k, v = (x.bfloat16() for x in error_curves.inputs("large", 0, rows=16, S=256, D=32))
    exact = torch.from_numpy(error_curves.truth(q, k, v)).bfloat16()
    if _verdict(subject.call(naive(q, k, v), q, k, v)) and not _verdict(subject.call(exact, q, k, v)):
        return _known("truth_in_the_same_dtype")
    q, k, v = error_curves.inputs("plain", 0, rows=4, S=64, D=8)
    small, large = (_verdict(subject.call(0 * q, q, k, unit * v)) for unit in (1e-6, 1e2))
    if small and not large:
        return _known("atol_1e-2")
    honest = [c.honest for c in (*tried, *_gallery())]
    rejected = any(right and not ok for right, ok in zip(honest, (*got, *verdicts), strict=True))
    return None if rejected else _known("too_wide")


def _known(name: str) -> Misconception:
    return next(mistake for mistake in ACCEPT if mistake.name == name)


@functools.cache
def _imitated(name: str) -> tuple[bool, ...]:
    """What this mistake makes of the gallery."""
    imitate = _known(name).imitate
    return tuple(bool(imitate(*copied(c.inputs))) for c in _gallery()) if imitate else ()


@functools.cache
def _gallery() -> tuple[Candidate, ...]:
    """Candidates of every kind, the same always: only to tell one mistake from another."""
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
