"""The configurations that are worth compiling for a row of a table, before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ringlab.blocks.triton.configs import KERNELS, Config, Row
from ringlab.blocks.triton.offline import SHARED_LIMIT, Job

HEAD_DIMS = (64, 128, 256)
"""The head dims of the rows. A kernel pads to a power of two. Tiles for 64 also suit smaller head dims."""
KINDS = (("16-bit", "ieee"), ("float32", "ieee"), ("float32", "tf32x3"))


@dataclass(frozen=True)
class Slot:
    """A row of a table that has no configuration yet: its kernel, largest head dim and dtype."""

    kernel: str
    head_dim: int
    dtype: str
    precision: str

    @property
    def torch_dtype(self) -> str:
        """Return the dtype with which the row is compiled and measured."""
        return "bfloat16" if self.dtype == "16-bit" else self.dtype

    def job(self, arch: str, config: Config) -> Job:
        """Return the offline job of this row with `config`."""
        return Job(self.kernel, arch, self.head_dim, self.torch_dtype, config)

    def row(self, config: Config, reason: str, compiled: tuple[int, int, int] | None = None) -> Row:
        """Return the row of the table with `config` filled in."""
        return Row(self.kernel, self.head_dim, self.dtype, config, reason, compiled)


def slots() -> list[Slot]:
    """Return a slot for every row of a table, in the table's order."""
    return [Slot(kernel, D, *kind) for kernel in KERNELS for kind in KINDS for D in HEAD_DIMS]


def candidates(slot: Slot, arch: str) -> list[Config]:
    """Return the configurations to compile for a row, without those that certainly need too much memory."""
    return [config for config in _all(slot) if least_shared_bytes(slot, config) <= SHARED_LIMIT[arch]]


def least_shared_bytes(slot: Slot, config: Config) -> int:
    """Return a lower bound of a program's shared memory, in bytes.

    Every stage but one adds a tile of each of the two tensors that the program walks over. With one stage no
    tile waits in shared memory for a later iteration, so the bound is 0.
    """
    walked = config.block_m if slot.kernel == "backward_dkv" else config.block_n
    width = 4 if slot.dtype == "float32" else 2
    return 2 * (config.num_stages - 1) * walked * slot.head_dim * width


_SIDES = (16, 32, 64, 128)


def _all(slot: Slot) -> Iterator[Config]:
    wide = slot.dtype == "float32"
    for block_m, block_n, warps, stages in product(_SIDES, _SIDES, (4, 8), (1, 2, 3, 4)):
        # The number of a tile's scores that one thread has in registers. With fewer scores the thread would
        # idle while it waits for memory. With more scores no other values would fit into its registers.
        scores = block_m * block_n // (32 * warps)
        if 1 <= scores <= (64 if wide else 128):
            yield Config(block_m, block_n, warps, stages, slot.precision)
