"""Checks of 09.delta and 09.block: one number per row, and the gradients from one block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.backward import NAMES, allowed, pair, sizes_of
from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all, compare_suspecting
from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.numbers import random
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("09")


def _delta_case(subject: Any, dout: torch.Tensor, out: torch.Tensor) -> Answered:
    left, right = oracle.float64(dout), oracle.float64(out)
    truth = (left * right).sum(-1)
    size = float((np.abs(left) * np.abs(right)).sum(-1).max())
    bound = 4 * float(np.finfo(np.float32).eps) * out.shape[-1] ** 0.5 * size / (np.abs(truth).max() or 1.0)
    text = f"shape {tuple(out.shape)}, dout {str(dout.dtype).removeprefix('torch.')}"
    return Answered(subject.call(dout, out), truth, bound, names=("delta",), text=text)


def _check_delta(subject: Any, rng: np.random.Generator) -> None:
    shapes = ((1, 1, 1, 2), (1, 1, 3, 3), (2, 3, 4, 5))
    cases = (_delta_case(subject, random(rng, *shape), random(rng, *shape)) for shape in shapes)
    compare_all(cases)


def _check_delta_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """Check delta for a bfloat16 dout.

    A bfloat16 dout is exact in float32, so delta is wrong only if a product or a sum is computed in
    bfloat16.
    """
    shapes = ((1, 1, 2, 16), (1, 2, 8, 64))
    cases = [_delta_case(subject, random(rng, *shape).bfloat16(), random(rng, *shape)) for shape in shapes]
    for case in cases:
        expect_array(case.answer, case.truth.shape, name="delta")
    _compare_narrow(cases, mistake("delta_in_bfloat16"))


def _compare_narrow(cases: Sequence[Answered], rounded: Misconception) -> None:
    """Compare all cases.

    The mistake `rounded` is reported for a 16-bit result, and for an error that rounding to bfloat16 can cause.
    """
    if narrow := next((text for case in cases if (text := _returned_narrow(case))), None):
        raise rounded.failure(narrow)
    compare_suspecting(cases, rounded)
    for case in cases:
        parts = case.answer if isinstance(case.answer, (tuple, list)) else (case.answer,)
        for name, part in zip(case.names, parts, strict=True):
            expect_array(part, part.shape, name=name, dtype="float32")


def _returned_narrow(case: Answered) -> str | None:
    """Return in words which parts of the answer have 16 bits, or None if no part has."""
    parts = case.answer if isinstance(case.answer, (tuple, list)) else (case.answer,)
    dtypes = [str(part.dtype).removeprefix("torch.") for part in parts]
    found = [
        f"{name} is {dtype}"
        for name, dtype in zip(case.names, dtypes, strict=True)
        if dtype in ("bfloat16", "float16")
    ]
    return f"{case.text}: {', '.join(found)}, should be float32" if found else None


@dataclass(frozen=True)
class Case:
    """Rows with their final lse and out, and one of the blocks that the rows have seen."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None
    text: str

    @property
    def delta(self) -> torch.Tensor:
        return (self.dout.double() * self.out.double()).sum(-1).float()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the arguments of `block_backward`."""
        return self.dout, self.q, self.k, self.v, self.lse, self.delta, self.mask


def _case(
    rng: np.random.Generator,
    Lq: int,
    Lk: int,
    D: int,
    H: int = 1,
    K: int = 1,
    *,
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    size: float = 1.0,
    narrow: bool = False,
) -> Case:
    """Return rows that see this block and another block of the same length.

    `masks` are the masks of the two blocks.
    """
    dtype = torch.bfloat16 if narrow else torch.float32
    q, dout = random(rng, 1, H, Lq, D, size=size).to(dtype), random(rng, 1, H, Lq, D).to(dtype)
    k, v = (random(rng, 1, K, 2 * Lk, D).to(dtype) for _ in range(2))
    seen = None if masks is None else torch.cat(masks, dim=-1)
    out, lse = (torch.from_numpy(x).float() for x in oracle.attention(q, k, v, mask=seen))
    heads = "" if H == K == 1 else f", {H} query and {K} K/V heads"
    shown = "" if masks is None else f", mask {masks[0].int().tolist()}"
    text = f"{Lq} queries, {Lk} of {2 * Lk} keys, D={D}{heads}{shown}{', bfloat16' if narrow else ''}"
    here = [x[..., :Lk, :].contiguous() for x in (k, v)]
    return Case(dout, q, here[0], here[1], out, lse, None if masks is None else masks[0], text)


def _answered(subject: Any, case: Case) -> Answered:
    mask = None if case.mask is None else case.mask.numpy()
    truth = pair(*case.inputs[:6], mask)
    sizes, terms = sizes_of(case.dout, case.q, case.k, case.v, case.out, case.lse, mask)
    parts = expect_tuple(subject.call(*case.inputs), NAMES)
    got = [
        expect_array(part, right.shape, name=name)
        for name, part, right in zip(NAMES, parts, truth, strict=True)
    ]
    if any(np.isnan(part).any() for part in got):
        blind = not np.isfinite(case.lse.numpy()).all()
        raise mistake("nan_in_blind_rows" if blind else "overflows").failure(case.text)
    return Answered(parts, truth, allowed(truth, sizes, terms), names=NAMES, text=case.text)


def _verify(subject: Any, *cases: Case) -> None:
    compare_all(_answered(subject, case) for case in cases)


def _bool(*rows: str) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(_case(rng, Lq, Lk, D) for Lq, Lk, D in ((1, 1, 2), (2, 2, 2), (2, 3, 3), (4, 3, 5))))


def _check_masked(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on rows that see part of the block, no key of the block, or no key of either block."""
    cases = [_case(rng, 2, 2, 2, masks=(_bool("x.", "xx"), _bool("x.", ".."))) for _ in range(2)]
    cases += [
        _case(rng, 3, 3, 3, masks=(_bool("x..", "...", "xx."), _bool("xxx", "xx.", "x.."))),
        _case(rng, 3, 3, 3, masks=(_bool("...", "x..", "xxx"), _bool("...", "x..", "..."))),
    ]  # fmt: skip
    _verify(subject, *cases)


def _check_grouped(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(_case(rng, 3, 2, 3, H, K) for H, K in ((2, 1), (4, 2), (6, 2))))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on scores in the hundreds, for which exp of a raw score or of a raw lse is infinite."""
    _verify(subject, *(_weighty(rng, size) for size in (60.0, 200.0)))


def _weighty(rng: np.random.Generator, size: float) -> Case:
    """Return a case with scores of this size in which the block's gradients are not tiny.

    Cases are drawn until one fits, because in most draws one key gets all of the weight.
    """
    while True:
        case = _case(rng, 4, 4, 4, size=size)
        truth = pair(*case.inputs[:6])
        if all(np.abs(part).max() > 1e-2 for part in truth) and case.lse.max() > 100:
            return case


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """Check gradients for bfloat16 inputs.

    bfloat16 inputs are exact in float32, so only computing in bfloat16 makes a difference.
    """
    cases = [_case(rng, n, n, 16, H, K, narrow=True) for n, H, K in ((4, 1, 1), (16, 4, 2))]
    try:
        answered = [_answered(subject, case) for case in cases]
    except Crashed as crash:
        if re.search(r"dtype|BFloat16|scalar type", crash.counterexample):
            text = f"{cases[0].text}\n{crash.counterexample}"
            raise mistake("block_in_bfloat16").failure(text) from None
        raise
    _compare_narrow(answered, mistake("block_in_bfloat16"))


DELTA_STAGE = Stage(
    id="09.delta",
    function="row_delta",
    title="One number per row",
    hints=(
        "The softmax couples the weights of a row: if one grows, the others shrink. Which single number per row measures "
        "what they are all worth together? Which two tensors that you already have does it need?",
        "Multiply dO and O element by element, then sum over one axis. Which axis leaves one number per row? "
        "And which dtype should the product have if dO is bfloat16?",
        r"$\delta_i = \sum_d dO_{id}\,O_{id}$",
    ),
    misconceptions=misconceptions_of("09.delta"),
    checks=(
        Check("rows", 1, "visible", "rowsum(dO ⊙ O)", _check_delta),
        Check("bfloat16", 1, "visible", "a bfloat16 dO: delta is still float32", _check_delta_bfloat16),
    ),
)  # fmt: skip

BLOCK_STAGE = Stage(
    id="09.block",
    function="block_backward",
    title="What one block adds",
    hints=(
        "You hold the final lse of your rows. To know which share of a row's weight falls on the keys of this block, "
        "do you need any other block?",
        "Compute the scores again and mask them with −inf. The weights are exp(scores − lse), and 0 in rows whose lse is "
        "−inf. Then come dW = dO Vᵀ, dS and three products. Where query heads share a K/V head, give them an axis of their own "
        "and sum dK and dV over it.",
        r"$W = e^{S-L}$, $\;dS = W\circ(dO\,V^\top - \delta)$, $\;dQ = \tfrac{1}{\sqrt D}\,dS\,K$, "
        r"$\;dK_g = \tfrac{1}{\sqrt D}\sum_{h\to g} dS_h^\top Q_h$, $\;dV_g = \sum_{h\to g} W_h^\top dO_h$",
    ),
    misconceptions=misconceptions_of("09.block"),
    checks=(
        Check("values", 2, "visible", "dQ, dK and dV from the final lse", _check_values),
        Check("masked", 2, "visible", "rows that see part of the block, none of it, or no key at all", _check_masked),
        Check("grouped", 2, "visible", "query heads that share a K/V head", _check_grouped),
        Check("bfloat16", 1, "visible", "bfloat16 inputs, float32 gradients", _check_bfloat16),
        Check("large", 1, "stress", "scores in the hundreds", _check_large),
    ),
)  # fmt: skip
