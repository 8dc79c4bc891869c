"""Launch configurations of the kernels: one table per architecture, with a reason for each row.

The rows are data, in `tables/sm_80.toml` and its neighbours. Nothing is tuned at launch: the same call always runs the
same kernel. `ringlab tune` measures on a GPU and rewrites a table; `ringlab kernels --offline` compiles every row
without a GPU.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlab.errors import BackendError, DtypeError

if TYPE_CHECKING:
    import torch

SCORES = ("softcap", "dropout")
"""Score rules. Each set of them is compiled to a separate kernel."""
KERNELS = ("forward_step", "backward_dq", "backward_dkv")
COMPILED = ("sm_80", "sm_90", "sm_100")  # the architectures for which kernels are compiled offline
ARCHITECTURES = (*COMPILED, "interpreter")
LARGEST_HEAD_DIM = 256
TABLES = Path(__file__).parent / "tables"

# A row's `dtype`: both 16-bit formats need the same memory and instructions; float32 can be multiplied in two ways.
_KINDS = {"bfloat16": "16-bit", "float16": "16-bit", "float32": "float32"}


@dataclass(frozen=True)
class Config:
    """The launch configuration of a kernel.

    block_m is a number of query rows and block_n a number of keys, in every kernel. A program of the forward
    step or of dQ owns block_m rows and walks over keys. A program of dK/dV owns block_n keys and walks over
    rows. precision: the input_precision of `tl.dot`, which matters only for float32.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"

    def __str__(self) -> str:
        stages = "1 stage" if self.num_stages == 1 else f"{self.num_stages} stages"
        name = f"{self.block_m}×{self.block_n}, {self.num_warps} warps, {stages}"
        return name if self.precision == "ieee" else f"{name}, {self.precision}"


@dataclass(frozen=True)
class Row:
    """One row of a table: the largest head dim and the dtype for which `config` is used, and the reason.

    compiled: the registers and spilled bytes of a thread, and the shared bytes of a program, that offline
    compilation found at this head dim; None for the interpreter. scores: the score rules, joined by a space,
    for which this row replaces the row without score rules.
    """

    kernel: str
    head_dim: int
    dtype: str
    config: Config
    reason: str
    compiled: tuple[int, int, int] | None = None
    scores: str = ""

    @property
    def serves(self) -> tuple[str, int, str, str]:
        """Return (kernel, head dim, dtype, precision).

        A row with score rules and the row that it replaces are equal in these.
        """
        return self.kernel, self.head_dim, self.dtype, self.config.precision


def choose(
    kernel: str,
    arch: str,
    head_dim: int,
    dtype: torch.dtype | str,
    precision: str = "ieee",
    scores: Collection[str] = (),
) -> Config:
    """Return the launch configuration of `kernel`, from the row with the smallest sufficient head dim.

    precision: "ieee" or "tf32x3", for float32; other dtypes ignore it. scores: the score rules that the
    kernel applies, among SCORES. With some rules the tiles that are otherwise best would spill, so these
    rules have separate rows. Of the rows whose rules are all applied, the row with the most rules is used. If
    two rows have equally many rules, the row with the smaller tile is used.
    Raises: BackendError for an unknown kernel, architecture or precision, or a head dim above 256; DtypeError.
    """
    plain = choose_row(kernel, arch, head_dim, dtype, precision)
    rules = {row: set(row.scores.split()) for row in table(arch) if row.serves == plain.serves}
    ruled = [row for row, needed in rules.items() if needed and needed <= set(scores)]
    size = {row: row.config.block_m * row.config.block_n for row in ruled}
    return min(ruled, key=lambda row: (-len(rules[row]), size[row]), default=plain).config


def choose_row(
    kernel: str, arch: str, head_dim: int, dtype: torch.dtype | str, precision: str = "ieee"
) -> Row:
    """Return the row that `choose` uses if there are no score rules. Raises: BackendError, DtypeError."""
    name = str(dtype).removeprefix("torch.")
    if name not in _KINDS:
        remedy = "use block='blockwise'" if name == "float64" else "convert the tensors to one of these"
        raise DtypeError("bfloat16, float16 or float32", name, remedy)
    if kernel not in KERNELS:
        raise BackendError(f"one of the kernels {', '.join(KERNELS)}", repr(kernel))
    for row in table(arch):
        wanted = row.config.precision == precision or name != "float32"
        fits = row.kernel == kernel and row.dtype == _KINDS[name] and row.head_dim >= head_dim
        if fits and wanted and not row.scores:
            return row
    if head_dim > LARGEST_HEAD_DIM:
        raise BackendError(
            f"a head dim from 1 to {LARGEST_HEAD_DIM}",
            str(head_dim),
            "use block='blockwise', which takes any",
        )
    raise BackendError(
        f"a row of {arch} for {kernel}, {name} ({precision})",
        f"head dim {head_dim}",
        "float32 has the precisions ieee and tf32x3",
    )


def padded(head_dim: int) -> int:
    """Return the power of two that a head dim is padded to: at least 16, as matrix products need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def architecture(capability: tuple[int, int]) -> str:
    """Return the table for a GPU of compute capability `capability`.

    Consumer GPUs (8.6, 8.9, 12.x) use the table of sm_80: they have the instructions that its kernels need,
    and its rows fit into their smaller shared memory. Raises: BackendError for a capability below 8.0.
    """
    if capability < (8, 0):
        raise BackendError("a GPU of compute capability 8.0 or more", f"{capability[0]}.{capability[1]}")
    return {9: "sm_90", 10: "sm_100"}.get(capability[0], "sm_80")


@cache
def table(arch: str) -> tuple[Row, ...]:
    """Return the rows of `arch`, ascending by head dim for each kernel and dtype. Raises: BackendError."""
    if arch not in ARCHITECTURES:
        raise BackendError(f"one of the architectures {', '.join(ARCHITECTURES)}", repr(arch))
    return read(TABLES / f"{arch}.toml")


def read(path: Path) -> tuple[Row, ...]:
    """Return the rows of a table file, ascending by head dim."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = [_row(kernel, each) for kernel in KERNELS for each in data[kernel]]
    return tuple(sorted(rows, key=lambda row: row.head_dim))


def compiler_of(path: Path) -> str:
    """Return the version of Triton that made the column `compiled` of a table file."""
    return str(tomllib.loads(path.read_text(encoding="utf-8")).get("triton", ""))


def render(arch: str, triton: str, rows: Iterable[Row]) -> str:
    """Return the text of a table file from which `read` returns the same rows."""
    parts = [_HEADER.format(arch=arch), f"triton = {json.dumps(triton)}\n"]
    listed = tuple(rows)
    for kernel in KERNELS:
        lines = [f"  {_line(row)},\n" for row in listed if row.kernel == kernel]
        parts += [f"\n{kernel} = [\n", *lines, "]\n"]
    return "".join(parts)


_HEADER = """\
# Launch configurations for {arch}: rows × keys of a tile, warps of a program, stages of its pipeline.
# A row serves head dims up to `head_dim`, one with `scores` only kernels with those score rules; compiled = [registers, spilled bytes, shared bytes] at that head dim,
# by the version of Triton named here. A reason without a time was found by compiling: nothing was measured.
# Written by `ringlab tune` on a GPU; `ringlab kernels --offline --record` writes the numbers of compiling anew.

"""


def _line(row: Row) -> str:
    config = row.config
    cells: dict[str, Any] = {"head_dim": row.head_dim, "dtype": row.dtype}
    if row.dtype == "float32":
        cells["precision"] = config.precision
    if row.scores:
        cells["scores"] = row.scores
    cells |= {"block_m": config.block_m, "block_n": config.block_n}
    cells |= {"warps": config.num_warps, "stages": config.num_stages}
    if row.compiled:
        cells["compiled"] = list(row.compiled)
    cells["reason"] = row.reason
    # A JSON string, integer or list of integers is also valid TOML.
    return "{ " + ", ".join(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in cells.items()) + " }"


def _row(kernel: str, each: Mapping[str, Any]) -> Row:
    config = Config(
        each["block_m"], each["block_n"], each["warps"], each["stages"], each.get("precision", "ieee")
    )
    registers_spills_shared = tuple(each["compiled"]) if "compiled" in each else None
    return Row(
        kernel,
        each["head_dim"],
        each["dtype"],
        config,
        each["reason"],
        registers_spills_shared,
        each.get("scores", ""),
    )
