"""`ringlab tune` measures launch configurations on a GPU, and `ringlab calibrate` measures a machine.

`ringlab tune` rewrites the table of the GPU's architecture. `ringlab calibrate` writes a hardware file for
this machine, and compares simulated times with measured times.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ringlab.cli.output import (
    Json,
    check_writable,
    finish,
    for_people,
    people,
    progress_bar,
    reporting_errors,
    stderr,
)
from ringlab.errors import CostError

if TYPE_CHECKING:
    from ringlab.bench.tune import Tuned
    from ringlab.blocks.triton.candidates import Slot


Kernels = Annotated[list[str] | None, typer.Option("--kernel", help="Only this kernel; repeatable.")]
HeadDims = Annotated[
    list[int] | None, typer.Option("--head-dim", help="Only this row: 64, 128 or 256; repeatable.")
]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="Only 16-bit or float32; repeatable.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="S of the timed problem.")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="H of the timed problem.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Number of counted rounds in the final.")]
Most = Annotated[
    int | None,
    typer.Option(
        "--most",
        min=1,
        help="Configurations of a row to run beside the table's own, the likeliest by a model of occupancy. "
        "By default 32, with --short 12.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        help="Number of processes that compile. By default 2, with --short one for each of up to 16 cores.",
    ),
]
Short = Annotated[
    bool,
    typer.Option(
        "--short",
        help="Only the rows of head dim 128 and 16 bits, unless --head-dim or --dtype is given, and fewer runs.",
    ),
]
Rewritten = Annotated[
    Path | None,
    typer.Option("--table", help="Write the table here instead of replacing ringlab's own."),
]
Output = Annotated[Path | None, typer.Option("--output", help="Write the JSON to this file too.")]


def tune(
    kernel: Kernels = None,
    head_dim: HeadDims = None,
    dtype: Dtypes = None,
    tokens: Tokens = 8192,
    heads: Heads = 16,
    rounds: Rounds = 31,
    most: Most = None,
    processes: Processes = None,
    short: Short = False,
    table: Rewritten = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure launch configurations on this machine's GPU and rewrite its table. Needs a GPU.

    Before it starts, it prints on stderr how many configurations it will compile and run. Without options these
    are thousands, and take hours.
    """
    if short:
        head_dim, dtype = head_dim or [128], dtype or ["16-bit"]
        most, processes = most or 12, processes or min(16, os.cpu_count() or 1)
    most, processes = most or 32, processes or 2
    wanted = _wanted(kernel, head_dim, dtype)
    with reporting_errors(as_json):
        if table is not None:
            check_writable("--table", table)
        if output is not None:
            check_writable("--output", output, make_folder=True)
        tuned, arch = _measure(wanted, tokens, heads, rounds, processes, most)
        path = _write(tuned, arch, processes, table)
    ok = all(each.row for each in tuned)
    result = {"ok": ok, "arch": arch, "file": str(path), "rows": [each.as_json() for each in tuned]}
    if not for_people(result, output, as_json):
        finish(ok)
    for each in tuned:
        where = f"{each.slot.kernel}, D up to {each.slot.head_dim}, {each.slot.dtype}"
        what = (
            f"{each.row.config}: {each.row.reason}"
            if each.row
            else "nothing right was left, the old row stays"
        )
        people.print(f"{where}: {what}", highlight=False)
    people.print(f"{path}\nReload: a running Python keeps the rows that it has read.", highlight=False)
    finish(ok)


def _wanted(kernels: list[str] | None, head_dims: list[int] | None, dtypes: list[str] | None) -> list[Slot]:
    from ringlab.blocks.triton.candidates import slots

    chosen = slots()
    for option, name, given in (
        ("--kernel", "kernel", kernels),
        ("--head-dim", "head_dim", head_dims),
        ("--dtype", "dtype", dtypes),
    ):
        known = sorted({getattr(slot, name) for slot in slots()})
        if unknown := [value for value in given or () if value not in known]:
            raise typer.BadParameter(
                f"{unknown[0]}: not among {', '.join(map(str, known))}", param_hint=option
            )
        chosen = [slot for slot in chosen if not given or getattr(slot, name) in given]
    return chosen


def _measure(
    wanted: list[Slot], tokens: int, heads: int, rounds: int, processes: int, most: int
) -> tuple[list[Tuned], str]:
    from ringlab.bench.tune import Gpu, stamp, tune, work
    from ringlab.blocks.triton.configs import architecture
    from ringlab.blocks.triton.offline import compile_all

    gpu = Gpu(tokens, heads)  # raises DeviceError without a GPU

    import torch

    arch = architecture(torch.cuda.get_device_capability())
    where, tuned = stamp(tokens, heads), []
    stderr.print(work(wanted, arch, processes, most), highlight=False)
    with progress_bar() as bar:
        task = bar.add_task("tune", total=len(wanted))
        for slot in wanted:
            bar.update(task, description=f"tune {slot.kernel} D={slot.head_dim} {slot.dtype}")
            tuned.append(tune(slot, arch, gpu.race, rounds, processes, where, compile_all, most))
            bar.advance(task)
    return tuned, arch


def _write(tuned: list[Tuned], arch: str, processes: int, table: Path | None) -> Path:
    from ringlab.bench.tune import merged
    from ringlab.blocks.triton import configs
    from ringlab.blocks.triton.offline import compile_all, jobs_of, recorded

    path = table or configs.TABLES / f"{arch}.toml"
    rows = merged(configs.table(arch), tuned)
    found = compile_all(jobs_of(arch, rows), processes)
    path.write_text(recorded(arch, rows, found), encoding="utf-8")
    configs.table.cache_clear()
    return path


DEFAULT = Path("this-machine.toml")


def calibrate(
    ranks: Annotated[int, typer.Option("--ranks", help="P, processes of one thread each.")] = 2,
    tokens: Annotated[
        str, typer.Option("--tokens", help="S, the lengths of the compared rings.")
    ] = "4096,6144,8192",
    heads: Annotated[int, typer.Option("--heads", help="H, query heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="K, key/value heads; by default as many as query heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", help="D.")] = 64,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option("--rounds", help="Number of counted rounds.")] = 9,
    name: Annotated[str, typer.Option("--name", help="The name of the hardware.")] = "this-machine",
    hardware: Annotated[Path, typer.Option("--hardware", help="The hardware file to write.")] = DEFAULT,
    replace: Annotated[bool, typer.Option("--replace", help="Replace that file if it exists.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Write the JSON to this file too.")] = None,
    as_json: Json = False,
) -> None:
    """Measure tiles, links and the ring on this machine; write a hardware file; compare with the simulator."""
    with reporting_errors(as_json):
        from ringlab.bench.calibrate import calibrate as run
        from ringlab.cost.hardware import write_hardware
        from ringlab.cost.sizes import Attention
        from ringlab.cost.units import tokens as count

        if not replace:
            check_new(hardware)
        check_writable("--hardware", hardware)
        if output is not None:
            check_writable("--output", output, make_folder=True)
        lengths = tuple(count(part) for part in tokens.split(","))
        sizes = Attention(1, heads, kv_heads or heads, head_dim, dtype)
        found, report = run(sizes, ranks, lengths, rounds, name)
        write_hardware(hardware, found)
    if for_people({**report, "hardware_file": str(hardware)}, output, as_json):
        _print(report, hardware)


def check_new(hardware: Path) -> None:
    """Check that the hardware file does not exist yet. Raises: CostError if it exists."""
    if hardware.exists():
        raise CostError(
            "a new file for the hardware",
            f"{hardware}, which exists",
            "--replace, or --hardware another.toml",
        )


def _print(report: dict[str, Any], hardware: Path) -> None:
    people.print(report["title"], highlight=False)
    for of, block in report["block_times"].items():
        people.print(f"{of:9} {block}", highlight=False)
    people.print(f"{'link':9} {report['link']}", highlight=False)
    table = Table("the ring", "tokens", "measured", "predicted", "error", box=None)
    for case in report["cases"]:
        table.add_row(
            case["pass"].replace("_", " + "),
            f"{case['tokens']:,}",
            f"{case['measured_s'] * 1e3:.1f} ms",
            f"{case['predicted_s'] * 1e3:.1f} ms",
            f"{case['relative_error']:+.1%}",
        )
    people.print(table)
    people.print(f"worst error {report['worst_relative_error']:.1%}")
    people.print(f"written: {hardware}; use it as --hardware {hardware}")
