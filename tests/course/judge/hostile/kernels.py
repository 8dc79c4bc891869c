"""Submissions with Triton kernels that reach outside of their tensors, never end, or record false accesses.

`test_hostile_kernels` gives two points for doubling a tensor, and three more if the worker reports that a
kernel read every element once.
"""

from __future__ import annotations

COMMON = """
import os, sys, threading, time
import torch
import triton
import triton.language as tl

@triton.jit
def copy_kernel(x_ptr, out_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, FACTOR * tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)

def copied(x, factor=1.0):
    out = torch.empty_like(x)
    copy_kernel[(triton.cdiv(len(x), 4),)](x, out, len(x), FACTOR=factor, BLOCK=4)
    return out
"""

KERNELS = {
    "stores far outside of its tensor": """
@triton.jit
def far_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + 1_000_000 + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))
def double(x):
    far_kernel[(1,)](x, BLOCK=4)
    return x
""",
    "loads before its tensor": """
@triton.jit
def near_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr - 64 + tl.arange(0, BLOCK)))
def double(x):
    out = torch.empty(4)
    near_kernel[(1,)](x, out, BLOCK=4)
    return out
""",
    "takes a number for a pointer": """
@triton.jit
def wild_kernel(address, BLOCK: tl.constexpr):
    tl.store((address + tl.arange(0, BLOCK)).to(tl.pointer_type(tl.float32)), tl.zeros((BLOCK,), tl.float32))
def double(x):
    wild_kernel[(1,)](id(x), BLOCK=4)
    return x
""",
    "forges accesses of values that are wrong": """
def double(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if type(value) is list and frame.f_code.co_name == "_answer":
                copied(x)
                value[:] = value * 2
        frame = frame.f_back
    return copied(x)
""",
    "writes its accesses down itself": """
def double(x):
    import ringlab_course.judge.worker as worker
    worker.written_down = lambda accesses: {"names": ["x_ptr"], "ok": True}
    return x
""",
    "stores the answer of a kernel that did not run": """
def double(x):
    os.environ["TRITON_INTERPRET"] = "0"
    triton.jit(lambda: 5)
    return torch.full_like(x, float("nan"))
""",
}
CONDEMNED = ("writes its accesses down itself",)
SUBMISSIONS = {name: COMMON + source for name, source in KERNELS.items()}
