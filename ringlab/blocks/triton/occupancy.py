"""A model of how many programs of a compiled kernel fit on an SM at once, and how long a score then takes.

The model orders configurations before they are timed. It is not fitted to measurements and predicts no speed.
It counts the clocks in which one SM, with the rates of its units, computes one tile of a program. LATENCY,
LOOP and PER_SCORE are estimates. The units of an SM work at the same time only if several programs are
resident, because a program waits for its own matrix product before its softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, hypot
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringlab.blocks.triton.offline import Compiled

REGISTERS, REGISTERS_AT_ONCE = 65_536, 256  # registers of an SM, and the unit in which a warp gets them
MOST_WARPS, MOST_PROGRAMS = 64, 32
SHARED_OF_A_PROGRAM = 1024  # bytes that the system adds to a program's own
TENSOR_MEMORY = 512  # columns, sm_100
LOADED, READ = 64, 128  # bytes per clock, from L2 and from shared memory
LATENCY, LOOP = 600, 80  # clocks until data from L2 arrive; clocks for barriers and addresses per tile
MATRIX_ROWS = 64  # rows that one warpgroup instruction multiplies; mma.sync multiplies those of one warp
TOKENS = 8192  # tokens of a block, which determine what share of the computed scores is hidden
# Instructions that a thread needs per score for softmax and mask.
PER_SCORE = {"forward_step": 8, "backward_dq": 10, "backward_dkv": 12}
PRODUCTS = {"forward_step": 2, "backward_dq": 3, "backward_dkv": 4}  # matrix products per tile


@dataclass(frozen=True)
class SM:
    """One multiprocessor.

    flops: the 16-bit FLOPs of its matrix units per clock. lanes: its float32 units, each with two FLOPs per
    clock.
    """

    shared_bytes: int
    flops: int
    lanes: int


# Sources: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; the white papers of A100, H100
# and B200, whose peak FLOP/s are the product of `flops`, the clock rate and the number of SMs.
SMS = {
    "sm_80": SM(164 * 1024, 2048, 64),
    "sm_90": SM(228 * 1024, 4096, 128),
    "sm_100": SM(228 * 1024, 8192, 128),
}


def resident_programs(found: Compiled) -> int:
    """Return the number of programs that fit on an SM at once; 0 if a single program does not fit."""
    warps, sm = found.job.config.num_warps, SMS[found.job.arch]
    of_a_warp = ceil(found.registers * 32 / REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    limits = [
        MOST_PROGRAMS,
        MOST_WARPS // warps,
        REGISTERS // max(1, of_a_warp * warps),
        sm.shared_bytes // (found.shared_bytes + SHARED_OF_A_PROGRAM),
    ]
    if found.tensor_memory_columns:
        limits.append(TENSOR_MEMORY // found.tensor_memory_columns)
    return min(limits)


def clocks_per_score(found: Compiled) -> float:
    """Return an SM's clocks for one score by this module's model, or infinity if no program fits."""
    job, config, sm = found.job, found.job.config, SMS[found.job.arch]
    programs = resident_programs(found)
    if not programs:
        return float("inf")
    scores = config.block_m * config.block_n
    walked = config.block_m if job.kernel == "backward_dkv" else config.block_n
    owned, width = scores // walked, 4 if job.dtype == "float32" else 2
    rescaled = owned * job.head_dim if job.kernel == "forward_step" else 0
    spilled = 2 * found.spill_bytes / 4 * 32 * config.num_warps  # a word is stored and loaded once per tile
    lanes = PER_SCORE[job.kernel] * scores + rescaled + spilled
    matrix = PRODUCTS[job.kernel] * 2 * scores * job.head_dim / _rate(found, sm)
    load = 2 * walked * job.head_dim * width / LOADED
    operands = _operand_bytes(found, owned, walked) / READ
    one_program = LOOP + max(matrix, operands) + lanes / min(sm.lanes, 32 * config.num_warps)
    fetch, ahead = LATENCY + load, config.num_stages - 1  # `ahead`: tiles fetched while a tile is computed
    alone = max(one_program, fetch / ahead) if ahead else one_program + fetch
    busiest = max(matrix, load, operands, lanes / sm.lanes)
    wasted = (config.block_m + config.block_n) / TOKENS  # hidden share of the computed scores
    return hypot(busiest, alone / programs) / scores * (1 + wasted)


def _rate(found: Compiled, sm: SM) -> float:
    """Return the FLOPs per clock. float32 runs on lanes, or as three products at half the 16-bit rate."""
    if found.job.dtype != "float32":
        return sm.flops
    return sm.flops / 6 if found.job.config.precision == "tf32x3" else 2 * sm.lanes


def _operand_bytes(found: Compiled, owned: int, walked: int) -> int:
    """Return the bytes that a tile's matrix products read from shared memory.

    The tile that the program walks over is read again for each group of rows that one instruction multiplies.
    """
    job = found.job
    width = 4 if job.dtype == "float32" else 2
    together = owned // job.config.num_warps if found.tensor_core in ("", "mma.sync") else MATRIX_ROWS
    groups = max(1, owned // max(1, together))
    return width * job.head_dim * (PRODUCTS[job.kernel] * walked * groups + owned)
