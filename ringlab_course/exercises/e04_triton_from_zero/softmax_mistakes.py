"""Exercise 04: the plainest softmax of rows in a padded buffer, and the common mistakes made with it in a kernel.

Every imitation takes what the learner's function takes, (x, out, columns), and returns what then stands in
the first `columns` places of out's rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("04.softmax")


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
