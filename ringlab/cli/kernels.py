"""`ringlab kernels`: the tables of launch configurations, and their compilation without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ringlab.cli.output import finish, people, print_json, progress_bar, reporting_errors

if TYPE_CHECKING:
    from ringlab.blocks.triton.offline import Compiled, Job

Offline = Annotated[bool, typer.Option("--offline", help="Compile every row, which needs no GPU.")]
Archs = Annotated[list[str] | None, typer.Option("--arch", help="sm_80, sm_90 or sm_100; repeatable.")]
Kernels = Annotated[
    list[str] | None, typer.Option("--kernel", help="forward_step, backward_dq or backward_dkv; repeatable.")
]
Record = Annotated[bool, typer.Option("--record", help="With --offline: write the numbers into the tables.")]
Processes = Annotated[int, typer.Option("--processes", min=1, help="Number of processes that compile.")]
JsonList = Annotated[
    bool, typer.Option("--json", help="Print one JSON list on stdout and nothing else there.")
]


def kernels(
    offline: Offline = False,
    arch: Archs = None,
    kernel: Kernels = None,
    record: Record = False,
    processes: Processes = 2,
    as_json: JsonList = False,
) -> None:
    """List the kernels' launch configurations; with --offline, compile them. Exits 1 if a budget is exceeded."""
    from ringlab.blocks.triton.configs import ARCHITECTURES, COMPILED, KERNELS

    if record and (kernel or not offline):
        raise typer.BadParameter("requires --offline, and excludes --kernel", param_hint="--record")
    archs = _among("--arch", arch, COMPILED if offline else ARCHITECTURES)
    names = _among("--kernel", kernel, KERNELS)
    if not offline:
        _print_tables(archs, names, as_json)
        return
    with reporting_errors(as_json):
        found = _compile(archs, names, processes)
        if record:
            _record(archs, found)
    if as_json:
        print_json([each.as_json() for each in found])
    else:
        _print_compiled(found)
    finish(not any(each.broken() for each in found))


def _among(option: str, wanted: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [name for name in wanted or () if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(known)}", param_hint=option)
    return tuple(wanted or known)


def _print_tables(archs: tuple[str, ...], names: tuple[str, ...], as_json: bool) -> None:
    from dataclasses import asdict

    from ringlab.blocks.triton.configs import table

    rows = [(arch, row) for arch in archs for row in table(arch) if row.kernel in names]
    if as_json:
        print_json([{"arch": arch} | asdict(row) for arch, row in rows])
        return
    shown = Table("kernel", "architecture", "D up to", "dtype", "configuration", "reason")
    for arch, row in rows:
        serves = f"{row.dtype} {row.scores}".strip()
        shown.add_row(row.kernel, arch, str(row.head_dim), serves, str(row.config), row.reason)
    people.print(shown)
    people.print("Sizes are rows × keys. Compile them without a GPU: ringlab kernels --offline")


def _compile(archs: tuple[str, ...], names: tuple[str, ...], processes: int) -> list[Compiled]:
    from ringlab.blocks.triton.offline import compile_all, shipped_jobs

    jobs = shipped_jobs(archs, names)
    with progress_bar() as bar:
        task = bar.add_task("kernels --offline", total=len(jobs))
        return compile_all(jobs, processes, lambda _: bar.advance(task))


def _record(archs: tuple[str, ...], found: list[Compiled]) -> None:
    from ringlab.blocks.triton.configs import TABLES, table
    from ringlab.blocks.triton.offline import jobs_of, recorded

    for arch in archs:
        of = {each.job: each for each in found}
        text = recorded(arch, table(arch), [of[job] for job in jobs_of(arch, table(arch))])
        (TABLES / f"{arch}.toml").write_text(text, encoding="utf-8")


def _variant(job: Job) -> str:
    """Return the variant of a kernel in words: the step and the score rules for which it is compiled."""
    return " ".join((job.step, *job.scores.split(), *(("window",) if job.window else ())))


def _print_compiled(found: list[Compiled]) -> None:
    from ringlab.blocks.triton.configs import COMPILED

    shown = Table("kernel", "GPU", "D", "dtype", "step", "tile", "launch", title="compiled without a GPU")
    for heading in ("regs", "spills", "shared"):
        shown.add_column(heading, justify="right")
    shown.add_column("matrix")
    for each in sorted(found, key=lambda each: (COMPILED.index(each.job.arch), each.job.kernel)):
        job, config, count = each.job, each.job.config, each.tensor_core_count
        dtype = "bf16" if job.dtype == "bfloat16" else f"fp32 {config.precision}"
        launch = f"{config.num_warps}w {config.num_stages}s"
        cells = (
            job.kernel,
            job.arch,
            str(job.head_dim),
            dtype,
            _variant(job),
            f"{config.block_m}×{config.block_n}",
        )
        numbers = (each.registers, each.spill_bytes, each.shared_bytes)
        matrix = f"{count} {each.tensor_core}" if count else "none"
        style = "red" if each.broken() else ""
        shown.add_row(*cells, launch, *(f"{n:,}" for n in numbers), matrix, style=style)
    people.print(shown)
    for each in found:
        for sentence in each.broken():
            where = f"{each.job.kernel}, {each.job.arch}, D={each.job.head_dim}, {each.job.dtype}, {_variant(each.job)}"
            people.print(f"✗ {where}, {each.job.config}: {sentence}", style="red", highlight=False)
    people.print(
        "tile: rows × keys; launch: warps and stages; registers and spilled bytes of one thread, shared bytes of\n"
        "one program; matrix: instructions in the program's text. None of this is a speed."
    )
