"""Signatures for compiling kernels without a launch: the types, constants and alignments of a typical call."""

from __future__ import annotations

import inspect
from typing import Any

from ringlab.blocks.triton import kernels
from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.offline import STEPS, Job

_WIDTH = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_INPUTS = {"Q", "K", "V", "DOUT", "OUT", "DQ"}  # in the dtype of q; other tensors are float32 state
_TABLES = {"PROGRAMS", "SEGMENTS", "ROWS_AT", "KEYS_AT"}
_COUNTS = {"n_programs", "n_rows", "n_keys", "H"}  # of any value, where strides are multiples of 16
_FACTORS = {"scale", "cap", "keep"}

_USUAL = {
    "NEGATIVE": False,
    "NON_FINITE": False,
    "GROUP": 4,
}  # a scale above 0, four query heads to a key/value head


def source(job: Job) -> Source:
    """Return the kernel of `job` with the signature of a call on dense tensors."""
    kernel = getattr(kernels, job.kernel)
    config, block_d = job.config, max(16, 1 << (job.head_dim - 1).bit_length())
    sizes = {
        "HEAD_DIM": job.head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    first, last = STEPS[job.step]
    known: dict[str, Any] = _USUAL | sizes | {"PRECISION": config.precision, "FIRST": first, "LAST": last}
    known |= {"SOFTCAP": "softcap" in job.scores, "DROPOUT": "dropout" in job.scores}
    parameters = inspect.signature(kernel.fn).parameters.values()
    constants = {each.name: known[each.name] for each in parameters if "constexpr" in str(each.annotation)}
    types = {name: _type(name, job.dtype) for name in kernel.arg_names if name not in constants}
    dense = job.head_dim % 16 == 0
    aligned = {name for name, type in types.items() if type[0] == "*" or (_is_stride(name) and dense)}
    return Source(kernel, types, constants, frozenset(aligned))


def _type(name: str, dtype: str) -> str:
    if name in _TABLES:
        return "*i32"
    if name.isupper() and name not in _COUNTS:
        return f"*{_WIDTH[dtype] if name in _INPUTS else 'fp32'}"
    return "fp32" if name in _FACTORS else "i32"


def _is_stride(name: str) -> bool:
    return name.endswith(("_b", "_h", "_l"))
