"""What each kernel is compiled for where nothing is launched: the types, constants and alignments of a call."""

from __future__ import annotations

from typing import Any

from ringlab.blocks.triton import kernels
from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.offline import Job

_WIDTH = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_INPUTS = {"Q", "K", "V", "DOUT", "OUT", "DQ"}  # in the dtype of q; other tensors are float32 state
_TABLES = {"PROGRAMS", "SEGMENTS"}
_COUNTS = {"n_programs", "n_rows", "n_keys", "H"}  # of any value, where strides are multiples of 16

# A step in the middle of a ring loads its state and stores it; the first and the last do less of that. Four
# query heads read one key/value head.
_STEP: dict[str, Any] = {"FIRST": False, "LAST": False, "NEGATIVE": False, "GROUP": 4}


def source(job: Job) -> Source:
    """Return the kernel of `job` with the signature of a call: dense tensors, a step in the middle of a ring."""
    kernel = getattr(kernels, job.kernel)
    config, block_d = job.config, max(16, 1 << (job.head_dim - 1).bit_length())
    sizes = {"HEAD_DIM": job.head_dim, "BLOCK_D": block_d, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    known = _STEP | sizes | {"PRECISION": config.precision}
    constants = {name: known[name] for name in kernel.arg_names if name in known}
    types = {name: _type(name, job.dtype) for name in kernel.arg_names if name not in constants}
    dense = job.head_dim % 16 == 0
    aligned = {name for name, type in types.items() if type[0] == "*" or (_is_stride(name) and dense)}
    return Source(kernel, types, constants, frozenset(aligned))


def _type(name: str, dtype: str) -> str:
    if name in _TABLES:
        return "*i32"
    if name.isupper() and name not in _COUNTS:
        return f"*{_WIDTH[dtype] if name in _INPUTS else 'fp32'}"
    return "fp32" if name == "scale" else "i32"


def _is_stride(name: str) -> bool:
    return name.endswith(("_b", "_h", "_l"))
