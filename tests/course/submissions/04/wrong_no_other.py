# expects: check=04.softmax:ragged misconception=no_other
import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, stride, BLOCK: tl.constexpr):
    """One row: load it, maximum, exponentials, sum, store."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * stride + column, mask=inside).to(tl.float32)
    maximum = tl.max(x, 0)
    powers = tl.exp(x - tl.where(maximum == -float("inf"), 0.0, maximum))
    total = tl.sum(powers, 0)
    result = powers / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * stride + column, result, mask=inside)


def softmax(x, out, columns):
    """Launch the kernel on all rows and return `out`."""
    rows, stride = x.shape
    softmax_kernel[(rows,)](x, out, columns, stride, BLOCK=triton.next_power_of_2(columns))
    return out
