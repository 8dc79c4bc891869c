"""Exercise 04: the plainest softmax of rows in a padded buffer, and the common mistakes made with it in a kernel.

Every imitation takes what the learner's function takes, (x, out, columns), and returns what then stands in
the first `columns` places of out's rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringlab.course.contract import Misconception


def softmax(x: Tensor, out: Tensor, columns: int) -> Tensor:
    """Return the softmax of each row in float32, rounded once to x's dtype; a row of −inf alone gives 0."""
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
        raise ValueError("no NaN to read")
    return torch.full_like(x[:, :columns], math.nan)


def _no_other(x: Tensor, out: Tensor, columns: int) -> Tensor:
    if x[:, columns:].isnan().any() or columns == block_of(columns):
        raise ValueError("another reason for a NaN, or no lane too many")
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
    if rows.dtype != torch.float16:
        raise ValueError("only float16 overflows here")
    powers = torch.exp(rows.float() - rows.float().amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True).half().float()


SOFTMAX = (
    Misconception(
        "one_program",
        "Only row 0 was computed. The grid says how many programs run: one per row, so (rows,).",
        _one_program,
    ),
    Misconception(
        "no_other",
        "The lanes past the last column were masked and came without `other`: then what they hold is undefined, on a GPU "
        "whatever was in the register, here NaN, so that you notice. Say other=-float('inf').",
        _no_other,
    ),
    Misconception(
        "nan_behind",
        "Behind the columns in use stood NaN, and it reached the result: neither adding -inf nor a weight of 0 removes a "
        "NaN. Do not load it: mask= and other=-float('inf') in the load.",
        _nan_behind,
    ),
    Misconception(
        "padding_counted",
        "Your row's weights are too small: the lanes past the last column were loaded as 0, and e^0 is no "
        "small weight. Load them as what vanishes in the sum: other=-float('inf').",
        _padding_counted,
    ),
    Misconception(
        "padding_read",
        "What stands behind the row's last column was counted: a block is a power of two, a row need not be. The "
        "load needs a mask, and other=-float('inf').",
        _padding_read,
    ),
    Misconception(
        "wrong_stride",
        "Row r begins `stride` elements after row r - 1, and a row in memory is longer than the columns in use: your "
        "rows begin `columns` elements apart.",
        _wrong_stride,
    ),
    Misconception(
        "hidden_row_is_nan",
        "A row that is -inf throughout came out as NaN: its maximum is -inf, and -inf - (-inf) has no value. "
        "Subtract 0 there, and do not divide by a sum of 0.",
        _hidden_is_nan,
    ),
    Misconception(
        "no_maximum",
        "exp overflows: subtract the row's maximum first, as in lesson 01. Nothing but the range changes.",
        _no_maximum,
    ),
    Misconception(
        "not_divided",
        "These are e^(x - maximum), not yet divided by their sum.",
        _undivided,
    ),
    Misconception(
        "base_two",
        "Your exponential has the base 2. 2^y is e^x only for y = x · log2(e): multiply by 1.4427 first, or use tl.exp.",
        _base_two,
    ),
    Misconception(
        "computed_in_half",
        "A row of 70,000 nearly equal entries came out wrong: their sum is beyond 65,504, the largest float16. Load, "
        "then `.to(tl.float32)`, and let the store round.",
        _in_half,
    ),
    Misconception(
        "stores_unmasked",
        "The values are right, but you also wrote past the last column, into memory that is not yours. On a GPU this "
        "overwrites a neighbour without any error. The store needs the mask as well.",
    ),
    Misconception(
        "computed_by_torch",
        "The values are right, but no kernel wrote them: the records show no store into all of `out`.",
    ),
    Misconception(
        "reads_again",
        "The values are right, but elements of x are read from memory more than once. One load brings the row; "
        "maximum, sum and quotient work on what is loaded.",
    ),
)
