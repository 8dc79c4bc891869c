"""Exercise 04: the checks of the softmax kernel, and imitations of common mistakes in it.

Buffers are wider than the columns in use. After the last of these columns, x contains other numbers and out
contains a canary. So if a mask is missing, the judge's process finds a wrong value or an overwritten canary.
The process that runs the kernel counts loads.

Every imitation has the arguments of the learner's function, (x, out, columns), and returns the first
`columns` columns of out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringlab_course.checking.answers import bound_from, expect_array
from ringlab_course.checking.diagnosis import compare_all
from ringlab_course.checking.emulated import Emulated, compare_emulated
from ringlab_course.checking.numbers import largest, rounding
from ringlab_course.exercises.e04_triton_from_zero.records import CANARY, expect_each_once, named, reads_of

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Recorded, Subject


from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("04.softmax")


def softmax(x: Tensor, out: Tensor, columns: int) -> Tensor:
    """Return the softmax of each row in float32, rounded once to x's dtype.

    A row that is all −inf gives 0.
    """
    return _softmax(x[:, :columns].float()).to(x.dtype)


def block_of(columns: int) -> int:
    """Return the smallest power of two that holds a row."""
    return 1 << (columns - 1).bit_length()


def _softmax(x: Tensor) -> Tensor:
    maximum = x.amax(-1, keepdim=True)
    powers = torch.exp(x - torch.where(maximum == -math.inf, 0.0, maximum))
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total == 0, 1.0, total)


def _padding_counted(x: Tensor, out: Tensor, columns: int) -> Tensor:
    rows = torch.nn.functional.pad(x[:, :columns].float(), (0, block_of(columns) - columns))
    return _softmax(rows)[:, :columns]


def _nan_behind(x: Tensor, out: Tensor, columns: int) -> Tensor:
    if not x[:, columns : block_of(columns)].isnan().any():
        return softmax(x, out, columns)
    return torch.full_like(x[:, :columns], math.nan)


def _no_other(x: Tensor, out: Tensor, columns: int) -> Tensor:
    if columns == block_of(columns):  # every lane has a column
        return softmax(x, out, columns)
    return torch.full_like(x[:, :columns], math.nan)


def _padding_read(x: Tensor, out: Tensor, columns: int) -> Tensor:
    return _softmax(x[:, : block_of(columns)].float())[:, :columns]


def _one_program(x: Tensor, out: Tensor, columns: int) -> Tensor:
    return torch.cat([softmax(x, out, columns)[:1], out[1:, :columns]])


def _wrong_stride(x: Tensor, out: Tensor, columns: int) -> Tensor:
    rows, flat, place = len(x), x.flatten(), out.flatten().clone()
    for row in range(rows):
        here = slice(row * columns, (row + 1) * columns)
        place[here] = _softmax(flat[here].float()).to(out.dtype)
    return place.reshape(out.shape)[:, :columns]


def _no_maximum(x: Tensor, out: Tensor, columns: int) -> Tensor:
    powers = torch.exp(x[:, :columns].float())
    return powers / powers.sum(-1, keepdim=True)


def _undivided(x: Tensor, out: Tensor, columns: int) -> Tensor:
    rows = x[:, :columns].float()
    maximum = rows.amax(-1, keepdim=True)
    return torch.exp(rows - torch.where(maximum == -math.inf, 0.0, maximum))


def _base_two(x: Tensor, out: Tensor, columns: int) -> Tensor:
    return _softmax(x[:, :columns].float() * math.log(2))


def _hidden_is_nan(x: Tensor, out: Tensor, columns: int) -> Tensor:
    return torch.softmax(x[:, :columns].float(), -1)


def _in_half(x: Tensor, out: Tensor, columns: int) -> Tensor:
    rows = x[:, :columns]
    if rows.dtype != torch.float16:  # nothing overflows
        return softmax(x, out, columns)
    powers = torch.exp(rows.float() - rows.float().amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True).half().float()


SOFTMAX = (
    mistake("one_program", _one_program),
    mistake("no_other", _no_other),
    mistake("nan_behind", _nan_behind),
    mistake("padding_counted", _padding_counted),
    mistake("padding_read", _padding_read),
    mistake("wrong_stride", _wrong_stride),
    mistake("hidden_row_is_nan", _hidden_is_nan),
    mistake("no_maximum", _no_maximum),
    mistake("not_divided", _undivided),
    mistake("base_two", _base_two),
    mistake("computed_in_half", _in_half),
    mistake("stores_unmasked"),
    mistake("computed_by_torch"),
    mistake("reads_again"),
)


JUNK = 9.0  # larger than most numbers before it, so that a sum that includes it is wrong


def small(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers on rows that fill their block."""
    _compare(
        subject, *(Rows(_normal(rng, rows, columns), columns) for rows, columns in ((1, 2), (3, 4), (2, 8)))
    )


def ragged(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers on rows shorter than their block.

    Their entries are negative, so that a 0 in the padding has a large weight.
    """
    sizes = ((1, 3, 4), (3, 5, 8), (4, 5, 16), (2, 100, 128))
    _compare(
        subject, *(Rows(-_normal(rng, rows, columns).abs() - 1, stride) for rows, columns, stride in sizes)
    )


def own(subject: Subject, rng: np.random.Generator) -> None:
    """Check that nothing is written outside of the columns in use."""
    for rows, columns, stride in ((1, 3, 4), (3, 9, 16)):
        values = _normal(rng, rows, columns)
        x, out = _buffers(values, stride)
        answer = expect_array(subject.call(x, out, columns), out.shape, name="out")
        lost = np.argwhere(answer[:, columns:] != CANARY)
        if len(lost):
            _expect_softmax(answer, values, x, out, _case(rows, columns, stride))
            row, column = lost[0]
            raise named(SOFTMAX, "stores_unmasked").failure(
                f"{_case(rows, columns, stride)}: out[{row}, {column + columns}] was overwritten"
            )


def large(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers on rows with entries whose exponential overflows."""
    _compare(
        subject,
        Rows(_normal(rng, 2, 4) + 500, 4, note="entries near 500, "),
        Rows(_normal(rng, 3, 6) * 300, 8, note="entries of several hundreds, "),
    )


def hidden(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers on rows with entries of −inf, among them a row that is all −inf."""
    cases = []
    for columns, stride, size in ((5, 8, 1), (8, 8, 300)):
        x = _normal(rng, 3, columns) * size
        x[0, 2], x[1] = -math.inf, -math.inf
        cases.append(Rows(x, stride, note="an entry of row 0 and all of row 1 are -inf, "))
    _compare(subject, *cases)


def half(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers on bfloat16 and float16 rows, which need sums in float32."""
    _compare(
        subject,
        Rows(_normal(rng, 2, 300).bfloat16(), 512, note="bfloat16, "),
        Rows((_normal(rng, 1, 70_000) * 0.01).half(), 131_072, note="float16, "),
    )


def work(subject: Subject, rng: np.random.Generator) -> None:
    """Check that a kernel stores every element once and loads every element once."""
    rows, columns, stride = 3, 6, 8
    values = _normal(rng, rows, columns)
    x, out = _buffers(values, stride)
    recorded: Recorded = subject.record(x, out, columns)
    _expect_softmax(recorded.answer, values, x, out, _case(rows, columns, stride))
    places = np.arange(rows)[:, None] * stride + np.arange(columns)
    expect_each_once(
        recorded,
        ("out_ptr",),
        places,
        named(SOFTMAX, "computed_by_torch"),
        _case(rows, columns, stride),
    )
    loads = reads_of(recorded, "x_ptr", rows * stride)[places]
    if loads.max() > 1:
        row, column = np.argwhere(loads > 1)[0]
        raise named(SOFTMAX, "reads_again").failure(
            f"{_case(rows, columns, stride)}: x[{row}, {column}] was loaded {loads[row, column]} times"
        )


def anything(subject: Subject, rng: np.random.Generator) -> None:
    """Check answers on other sizes and dtypes. In all cases but one, NaN follows the columns in use."""
    cases = []
    for rows, columns, stride, dtype, junk in (
        (2, 3, 8, torch.float32, JUNK),
        (1, 1, 1, torch.float32, math.nan),
        (17, 33, 64, torch.float16, math.nan),
        (5, 127, 200, torch.bfloat16, math.nan),
        (2, 1000, 1024, torch.float32, math.nan),
    ):
        x = (_normal(rng, rows, columns) * 3).to(dtype)
        cases.append(Rows(x, stride, f"{dtype}, ".removeprefix("torch."), junk))
    _compare(subject, *cases)


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).float()


def _case(rows: int, columns: int, stride: int) -> str:
    return f"{rows} rows, {columns} columns, stride {stride}"


def _buffers(values: Tensor, stride: int, junk: float = JUNK) -> tuple[Tensor, Tensor]:
    rows, columns = values.shape
    x = torch.full((rows, stride), junk).to(values.dtype)
    x[:, :columns] = values
    return x, torch.full_like(x, CANARY)


class Rows(NamedTuple):
    """One input: the columns in use, the stride of the buffer, and the number in its other columns."""

    values: Tensor
    stride: int
    note: str = ""
    junk: float = JUNK


def _compare(subject: Subject, *cases: Rows) -> None:
    """Raise Failure unless the columns in use of every result hold the softmax, as computed in float64."""

    def answers() -> Iterator[Emulated]:
        for case in cases:
            x, out = _buffers(case.values, case.stride, case.junk)
            text = case.note + _case(*case.values.shape, case.stride)
            answer = subject.call(x, out, case.values.shape[1])
            yield _answered(answer, case.values, x, out, text)

    compare_emulated(answers(), SOFTMAX)


def _expect_softmax(answer: Any, values: Tensor, x: Tensor, out: Tensor, case: str) -> None:
    # no known mistakes are passed, because a single input must not decide which mistake is named
    compare_all([_answered(answer, values, x, out, case)])


def _answered(answer: Any, values: Tensor, x: Tensor, out: Tensor, case: str) -> Emulated:
    columns = values.shape[1]
    got = expect_array(answer, out.shape, name="out", dtype=out.dtype)
    truth = _truth(values)
    bound = max(bound_from(softmax(x, out, columns), truth), rounding(truth, 4 * largest(values.float())))
    return Emulated(got[:, :columns], truth, bound, ("out",), case, (x, out, columns))


def _truth(values: Tensor) -> np.ndarray:
    numbers = values.double().numpy()
    maximum = numbers.max(-1, keepdims=True)
    powers = np.exp(numbers - np.where(np.isinf(maximum), 0.0, maximum))
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total == 0, 1.0, total)
