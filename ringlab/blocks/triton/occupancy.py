"""How many programs of a compiled kernel an SM holds at once, and how long a score then takes by a model.

The model orders configurations before they are timed. It has been fitted to nothing and gives no speed: clocks of one SM, from
the rates of its units, for the walk of a program over one tile. LATENCY, LOOP and PER_SCORE are estimates. The units work side by side as far as programs that are
resident together allow it, since one program waits for its own matrix product before its softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, hypot
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringlab.blocks.triton.offline import Compiled

REGISTERS, REGISTERS_AT_ONCE = 65_536, 256  # of an SM, and allocated to a warp together
MOST_WARPS, MOST_PROGRAMS = 64, 32
SHARED_OF_A_PROGRAM = 1024  # bytes that the system takes beside what a program asks for
TENSOR_MEMORY = 512  # columns, sm_100
LOADED, READ = 64, 128  # bytes of a clock, from L2 and from shared memory
LATENCY, LOOP = 600, 80  # clocks from a load to its data in L2; of barriers and addresses in each tile
MATRIX_ROWS = 64  # of one instruction of a warpgroup; mma.sync has those of one warp
TOKENS = 8192  # of a block, whose diagonal wastes a part of each tile
# Instructions of softmax and mask, of a thread.
PER_SCORE = {"forward_step": 8, "backward_dq": 10, "backward_dkv": 12}
PRODUCTS = {"forward_step": 2, "backward_dq": 3, "backward_dkv": 4}  # matrix products of a tile


@dataclass(frozen=True)
class SM:
    """One multiprocessor. flops: of its matrix units in a clock, 16-bit. lanes: float32 units, of two FLOPs in a clock each."""

    shared_bytes: int
    flops: int
    lanes: int


# Sources: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; the white papers of A100, H100
# and B200, whose peaks in FLOP/s are these times the clock and the number of SMs.
SMS = {
    "sm_80": SM(164 * 1024, 2048, 64),
    "sm_90": SM(228 * 1024, 4096, 128),
    "sm_100": SM(228 * 1024, 8192, 128),
}


def resident_programs(found: Compiled) -> int:
    """Return how many programs an SM holds at once; 0 where it cannot hold one."""
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
    """Return the clocks of an SM for one score by the model of this module; infinity where no program fits."""
    job, config, sm = found.job, found.job.config, SMS[found.job.arch]
    programs = resident_programs(found)
    if not programs:
        return float("inf")
    scores = config.block_m * config.block_n
    walked = config.block_m if job.kernel == "backward_dkv" else config.block_n
    owned, width = scores // walked, 4 if job.dtype == "float32" else 2
    rescaled = owned * job.head_dim if job.kernel == "forward_step" else 0
    spilled = 2 * found.spill_bytes / 4 * 32 * config.num_warps  # each is stored and loaded once a tile
    lanes = PER_SCORE[job.kernel] * scores + rescaled + spilled
    matrix = PRODUCTS[job.kernel] * 2 * scores * job.head_dim / _rate(found, sm)
    load = 2 * walked * job.head_dim * width / LOADED
    operands = _operand_bytes(found, owned, walked) / READ
    one_program = LOOP + max(matrix, operands) + lanes / min(sm.lanes, 32 * config.num_warps)
    fetch, ahead = LATENCY + load, config.num_stages - 1  # tiles that are fetched while one is computed
    alone = max(one_program, fetch / ahead) if ahead else one_program + fetch
    busiest = max(matrix, load, operands, lanes / sm.lanes)
    wasted = (config.block_m + config.block_n) / TOKENS  # of the tiles on a diagonal
    return hypot(busiest, alone / programs) / scores * (1 + wasted)


def _rate(found: Compiled, sm: SM) -> float:
    """FLOPs of a clock: float32 runs on the lanes, or as three products of a format of half the rate."""
    if found.job.dtype != "float32":
        return sm.flops
    return sm.flops / 6 if found.job.config.precision == "tf32x3" else 2 * sm.lanes


def _operand_bytes(found: Compiled, owned: int, walked: int) -> int:
    """Bytes that one tile's products read from shared memory: by each group of rows that one instruction multiplies."""
    job = found.job
    width = 4 if job.dtype == "float32" else 2
    together = owned // job.config.num_warps if found.tensor_core in ("", "mma.sync") else MATRIX_ROWS
    groups = max(1, owned // max(1, together))
    return width * job.head_dim * (PRODUCTS[job.kernel] * walked * groups + owned)
