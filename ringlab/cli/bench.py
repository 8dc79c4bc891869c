"""`ringlab bench`: the cost of emulation, real processes and kernels, relative to torch in one call."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ringlab.cli.contributed import ExtensibleBench
from ringlab.cli.output import (
    Json,
    finish,
    for_people,
    people,
    print_json,
    progress_bar,
    reporting_errors,
    stderr,
)

app = typer.Typer(
    cls=ExtensibleBench,
    help="Timings: paired ones against torch's own attention, and how long a user waits.",
    no_args_is_help=True,
)


@app.callback()
def bench() -> None:
    """Prepare the environment of all benchmarks."""
    # Processes that are measured may write .pyc files, as a user's Python does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


Tokens = Annotated[int, typer.Option("--tokens", min=1, help="S, the global sequence length.")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="H, query and key/value heads.")]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, help="D, the head dim.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="P, the world size.")]
Pairs = Annotated[int, typer.Option("--pairs", min=1, help="Number of counted pairs of runs.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Number of counted rounds.")]
Blocks = Annotated[
    str,
    typer.Option("--blocks", help="Comma-separated block backends: triton, native, cudnn, flash, flex, …"),
]
Output = Annotated[Path | None, typer.Option("--output", help="Write the JSON to this file too.")]

BLOCKS = "triton,native"
MASKS = {"causal": (True,), "full": (False,), "both": (True, False)}
RESULTS = Path("benchmarks/results")


@app.command()
def emulate(
    tokens: Tokens = 8192,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    ranks: Ranks = 8,
    pairs: Pairs = 11,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare virtual ranks with one call of torch's attention, both with all threads."""
    from ringlab.bench.emulate import Work, bench_emulate

    with reporting_errors(as_json), progress_bar() as bar:
        task = bar.add_task("bench emulate", total=4 * (pairs + 2))
        work = Work(H=heads, S=tokens, D=head_dim)
        measured = bench_emulate(work, ranks, pairs, lambda: bar.advance(task))
    _report(measured, output, as_json)


@app.command()
def processes(
    tokens: Tokens = 8192,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    ranks: Ranks = 2,
    pairs: Pairs = 11,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare gloo processes of one thread with one call of torch's attention on equally many threads."""
    from ringlab.bench.emulate import Work
    from ringlab.bench.processes import bench_processes

    with reporting_errors(as_json):
        measured = bench_processes(Work(H=heads, S=tokens, D=head_dim), ranks, pairs)
    _report(measured, output, as_json)


@app.command()
def peers(
    tokens: Tokens = 8192,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    ranks: Annotated[str, typer.Option("--ranks", help="Comma-separated numbers of gloo processes.")] = "2,4",
    rounds: Rounds = 7,
    names: Annotated[
        str, typer.Option("--peers", help="Comma-separated peers; those of the bench by default.")
    ] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare known packages of ring attention with ringlab's, causal, over gloo processes of one thread.

    The exit status is 1 if ringlab's own result is wrong.
    """
    numbers = [each.strip() for each in ranks.split(",")]
    if not all(each.isdigit() for each in numbers):
        raise typer.BadParameter("comma-separated numbers are needed", param_hint="--ranks")
    with reporting_errors(as_json), progress_bar() as bar:
        from ringlab.bench.emulate import Work
        from ringlab.bench.peers import PEERS, bench_peers

        task = bar.add_task("bench peers", total=len(numbers))
        measured = bench_peers(
            Work(H=heads, S=tokens, D=head_dim), [int(each) for each in numbers], rounds,
            [each.strip() for each in names.split(",")] if names else PEERS, dtype,
            progress=lambda: bar.advance(task),
        )  # fmt: skip
    if not for_people(measured, output, as_json):
        finish(measured["ok"])
    _print_peers(measured)
    finish(measured["ok"])


@app.command()
def answers(
    runs: Annotated[int, typer.Option("--runs", min=1, help="Number of counted answers.")] = 11,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure how long `ringlab plan` and `ringlab --help` take, from the start of their process to its end."""
    with reporting_errors(as_json), progress_bar() as bar:
        from ringlab.bench.answers import QUICK_ANSWERS, bench_answers

        task = bar.add_task("bench answers", total=len(QUICK_ANSWERS) * (runs + 1))
        measured = bench_answers(runs, progress=lambda: bar.advance(task))
    if not for_people(measured, output, as_json):
        return
    for case in measured["cases"]:
        people.print(case["command"], highlight=False)
        people.print(f"  median {case['median_s']:.2f} s, slowest {case['slowest_s']:.2f} s of {runs}")


@app.command()
def simulator(output: Output = None, as_json: Json = False) -> None:
    """Measure the time and the memory of simulations of 1,024 and 8,192 ranks with 16 million tokens."""
    with reporting_errors(as_json):
        from ringlab.bench.answers import bench_simulator

        measured = bench_simulator()
    if not for_people(measured, output, as_json):
        return
    for case in measured["cases"]:
        used, ranks = case["measured"], case["simulated"]["ranks"]
        people.print(
            f"{ranks:,} ranks: {used['process_wall_s']:.1f} s, {used['process_cpu_s']:.1f} s of CPU, {used['peak_rss_bytes'] / 2**20:.0f} MiB"
        )


@app.command()
def check(
    wrong: Annotated[int, typer.Option("--wrong", min=1, help="The most wrong rings.")] = 15,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure how long `ringlab check` takes for right rings, and for wrong rings until the first fault."""
    with reporting_errors(as_json), progress_bar() as bar:
        from ringlab.bench.conformance import bench_check

        task = bar.add_task("bench check", total=None)
        measured = bench_check(wrong, progress=lambda: bar.advance(task))
    if not for_people(measured, output, as_json):
        return
    for case in measured["cases"]:
        line = f"{case['seconds']:6.1f} s  {case['checks']} checks, {case['tier']}  {case['target']}"
        people.print(line, highlight=False)
    first = measured["wrong"]
    line = (
        f"{first['median_s']:6.1f} s  median of {len(first['seconds'])} wrong rings, until their first fault"
    )
    people.print(line, highlight=False)


@app.command()
def kernels(
    tokens: Tokens = 16384,
    heads: Heads = 16,
    head_dim: HeadDim = 128,
    rounds: Rounds = 31,
    blocks: Blocks = BLOCKS,
    mask: Annotated[str, typer.Option("--mask", help="causal, full or both.")] = "both",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare the kernels on one GPU with torch's cuDNN and flash attention, in bf16.

    Exits 1 without a GPU.
    """
    if mask not in MASKS:
        raise typer.BadParameter(f"{mask!r} is not one of {', '.join(MASKS)}", param_hint="--mask")
    with reporting_errors(as_json), progress_bar() as bar:
        from ringlab.bench.kernels import bench_kernels
        from ringlab.bench.problem import Problem

        masks = MASKS[mask]
        task = bar.add_task("bench kernels", total=2 * len(masks) * (rounds + 3))
        problem = Problem(H=heads, S=tokens, D=head_dim)
        chosen = [block.strip() for block in blocks.split(",")]
        measured = bench_kernels(problem, chosen, masks, rounds, progress=lambda: bar.advance(task))
    _report_cases(measured, output, as_json)


@app.command()
def ring(
    emulated: Annotated[int, typer.Option("--emulated", min=1, help="P, ranks that share the one GPU.")] = 8,
    tokens: Tokens = 65536,
    heads: Heads = 16,
    head_dim: HeadDim = 128,
    rounds: Rounds = 15,
    blocks: Blocks = BLOCKS,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare the zig-zag ring on one GPU with one call of the same kernel, causal, in bf16.

    Exits 1 without a GPU.
    """
    with reporting_errors(as_json), progress_bar() as bar:
        from ringlab.bench.emulated_ring import bench_ring
        from ringlab.bench.problem import Problem

        task = bar.add_task("bench ring", total=2 * (rounds + 3))
        problem = Problem(H=heads, S=tokens, D=head_dim)
        chosen = [block.strip() for block in blocks.split(",")]
        measured = bench_ring(problem, emulated, chosen, rounds, progress=lambda: bar.advance(task))
    _report_cases(measured, output, as_json)


@app.command()
def hour(
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=1.0,
            help="Time limit of all steps; by default 60, with eight GPUs 30.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run the steps that have passed once more.")] = False,
    steps: Annotated[
        str, typer.Option("--steps", help="Only steps whose names contain one of these, with commas.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="The result file; by default benchmarks/results/hour/GPU.json.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run all tests, benchmarks and labs that need a GPU, in the order of their value. Needs a checkout.

    Run it again to continue: steps that passed are kept until ringlab or the machine changes.
    Exits 1 unless all steps have passed.
    """
    from ringlab.bench.hour import FAILED, LATE, STEPS, Hour, minutes_for

    with reporting_errors(as_json):
        import torch

        gpus = torch.cuda.device_count()
        name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-") if gpus else ""
        file = output or RESULTS / "hour" / f"{name}.json"
        if again:
            file.unlink(missing_ok=True)
        words = [word.strip().lower() for word in steps.split(",") if word.strip()]
        chosen = [step for step in STEPS if not words or any(word in step.name.lower() for word in words)]
        if not chosen:
            raise typer.BadParameter(
                f"names none of {', '.join(step.name for step in STEPS)}", param_hint="--steps"
            )

        def tell(name: str, entry: Mapping[str, Any]) -> None:
            seconds = f", {entry['seconds']:.0f} s" if "seconds" in entry else ""
            stderr.print(f"{name}: {entry['state']}{seconds}  {entry.get('why', '')}", highlight=False)
            for line in entry["last"] if entry["state"] in (FAILED, LATE) and "last" in entry else ():
                stderr.print(f"    {line}", highlight=False, markup=False)
            for row in entry.get("figures", ()):
                stderr.print(f"    {row['line']}", highlight=False, markup=False)

        run = Hour(file, Path("build/hour"), minutes or minutes_for(gpus), tell, chosen)
        kept = [step.name for step in chosen if step.name in run.entries]
        if kept and not as_json:
            stderr.print(f"passed before: {', '.join(kept)}", highlight=False)
        ok = run.run()
    if as_json:
        print_json({"ok": ok, "file": str(file), "steps": run.entries})
    else:
        people.print(f"{file}: look at it before you commit it\nringlab bench draw {file}", highlight=False)
    finish(ok)


@app.command()
def draw(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of results; all of benchmarks/results by default.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The folder of the pictures.")] = Path("build/figures"),
    as_json: Json = False,
) -> None:
    """Draw bars for each result, and a roofline for kernels, as PNG and SVG files with descriptions."""
    with reporting_errors(as_json):
        from ringlab.bench.draw import draw_all

        drawn = draw_all(files or sorted(RESULTS.glob("*.json")), out)
    if as_json:
        print_json({"ok": True, "figures": [{"file": str(path), "alt": alt} for path, alt in drawn]})
        return
    for path, alt in drawn:
        people.print(str(path), alt, sep="\n    ", highlight=False)


def _print_peers(measured: dict[str, Any]) -> None:
    for name, about in measured["about"].items():
        people.print(f"{name}: {about}", highlight=False)
    for case in measured["cases"]:
        people.print(f"P={case['P']}, {case['pass'].replace('_', ' + ')}")
        for name, found in case["contenders"].items():
            worst = max(found["errors"], key=found["errors"].get)
            verdict = "right" if found["correct"] else f"WRONG: {worst} off by {found['errors'][worst]:.2g}"
            line = f"  {name:24} {found['median_s']:8.3f} s  {found['ratio']:6.2f} times ringlab's  {verdict}"
            people.print(line, highlight=False)
        for name, reason in measured["not_run"][str(case["P"])].items():
            people.print(f"  {name:24} not run: {reason}", highlight=False)
        people.print(f"  fastest that is right: {case['fastest_correct']}", highlight=False)
    machine = measured["machine"]
    people.print(
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}"
    )


def _report_cases(measured: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Report a result with cases. The exit status is 1 if a block was wrong or could not run."""
    if not for_people(measured, output, as_json):
        finish(measured["ok"])
    for case in measured["cases"]:
        mask = "causal" if case["causal"] else "full"
        people.print(f"{case['pass'].replace('_', ' + ')}, {mask}")
        for name, found in case["contenders"].items():
            beside = case["speed_ratio"].get(name, {})
            ratios = ", ".join(f"{ratio:.2f} of {baseline}" for baseline, ratio in beside.items())
            line = f"  {name:16} {found['median_s'] * 1e3:9.3f} ms  {found['tflops']:7.1f} TFLOP/s  {ratios}"
            people.print(line, highlight=False)
        for name, reason in case["not_timed"].items():
            people.print(f"  {name:16} not timed: {reason}", highlight=False)
    for block, passes in measured.get("memory", {}).items():
        for of, side in passes.items():
            peak = f"{side['peak_shards']:.1f} tensors of S/P tokens beyond its shard"
            people.print(f"{block}, {of.replace('_', ' + ')}: peak of a rank {peak}")
    machine = measured["machine"]
    people.print(f"{', '.join(machine['gpus'])}, torch {machine['torch']}, {machine['date']}")
    finish(measured["ok"])


def _report(measured: dict[str, Any], output: Path | None, as_json: bool) -> None:
    if not for_people(measured, output, as_json):
        return
    for name in ("forward", "forward_backward"):
        side = measured[name]
        label = name.replace("_", " + ")
        times = f"{side['subject_median_s']:.3f} s against {side['baseline_median_s']:.3f} s"
        people.print(f"{label:18} ratio {side['ratio']:.3f}   ({times}, medians of {len(side['subject_s'])})")
    if alone := measured.get("block_alone"):
        ratios = " and ".join(f"{alone[f'{name}_ratio']:.3f}" for name in ("forward", "forward_backward"))
        people.print(f"the block alone, on the ring's tiles: ratio {ratios}", highlight=False)
    for name, side in measured.get("memory", {}).items():
        label = name.replace("_", " + ")
        largest, refused = side["largest_bytes"] / 2**20, side["scores_of_a_row_of_blocks_bytes"] / 2**20
        people.print(
            f"{label:18} peak {side['peak_shards']:.1f} shards a rank; "
            f"largest tensor {largest:.1f} MiB, where (S/P)·S scores would be {refused:.1f} MiB"
        )
    machine = measured["machine"]
    people.print(
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}"
    )
