"""The kernels without the factor of their strides, for the offline compiler: it then loads 2 bytes at a time."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ringlab.blocks.triton import compiling
from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.offline import Job
from tests.blocks.kernel_mutants import Mutant, loaded, mutated
from tests.blocks.kernel_mutants import source as right

_UNITS = "tl.cast(batch, tl.int64) * UNIT, tl.cast(heads, tl.int64) * UNIT, tokens * UNIT"
_UNDECLARED = Mutant("undeclared", "strides", _UNITS, "batch, heads, tokens", "")


def source(job: Job) -> Source:
    """Return the kernel of `job` without the factor, and its signature."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = loaded(mutated(right(), _UNDECLARED), Path(folder))
    return replace(compiling.source(job), kernel=getattr(kernels, job.kernel))
