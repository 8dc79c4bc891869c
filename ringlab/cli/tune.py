"""`ringlab tune`: measure launch configurations on a GPU and write the table of its architecture anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringlab.cli.output import Json, errors_told, finish, people, print_json, progress_bar

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
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Rounds of the final that are counted.")]
Processes = Annotated[int, typer.Option("--processes", min=1, help="Compile with so many processes.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write here and not over ringlab's own table.")]


def tune(
    kernel: Kernels = None,
    head_dim: HeadDims = None,
    dtype: Dtypes = None,
    tokens: Tokens = 8192,
    heads: Heads = 16,
    rounds: Rounds = 31,
    processes: Processes = 2,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure launch configurations on this machine's GPU and write its table anew. Needs a GPU."""
    wanted = _wanted(kernel, head_dim, dtype)
    with errors_told(as_json):
        tuned, arch = _measure(wanted, tokens, heads, rounds, processes)
        path = _write(tuned, arch, processes, output)
    ok = all(each.row for each in tuned)
    if as_json:
        print_json({"ok": ok, "arch": arch, "file": str(path), "rows": [each.as_json() for each in tuned]})
        finish(ok)
    for each in tuned:
        where = f"{each.slot.kernel}, D up to {each.slot.head_dim}, {each.slot.dtype}"
        what = (
            f"{each.row.config}: {each.row.reason}"
            if each.row
            else "nothing right was left, the old row stays"
        )
        people.print(f"{where}: {what}", markup=False, highlight=False)
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
    wanted: list[Slot], tokens: int, heads: int, rounds: int, processes: int
) -> tuple[list[Tuned], str]:
    from ringlab.bench.tune import Gpu, stamp, tune
    from ringlab.blocks.triton.configs import architecture

    track = Gpu(tokens, heads)  # says so where there is no GPU

    import torch

    arch = architecture(torch.cuda.get_device_capability())
    where, tuned = stamp(tokens, heads), []
    with progress_bar() as bar:
        task = bar.add_task("tune", total=len(wanted))
        for slot in wanted:
            bar.update(task, description=f"tune {slot.kernel} D={slot.head_dim} {slot.dtype}")
            tuned.append(tune(slot, arch, track, rounds, processes, where))
            bar.advance(task)
    return tuned, arch


def _write(tuned: list[Tuned], arch: str, processes: int, output: Path | None) -> Path:
    from ringlab.bench.tune import merged
    from ringlab.blocks.triton import configs
    from ringlab.blocks.triton.offline import compile_all, jobs_of, recorded

    path = output or configs.TABLES / f"{arch}.toml"
    rows = merged(configs.table(arch), tuned)
    found = compile_all(jobs_of(arch, rows), processes)
    path.write_text(recorded(arch, rows, found), encoding="utf-8")
    configs.table.cache_clear()
    return path
