"""`ringlab bench`: what emulation and real processes cost, as ratios to torch in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ringlab.cli.output import Json, errors_told, people, print_json, progress_bar

app = typer.Typer(help="Paired timings against torch's own attention.", no_args_is_help=True)

Tokens = Annotated[int, typer.Option("--tokens", min=1, help="S, the global sequence length.")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="H, query and key/value heads.")]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, help="D.")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="P, the world size.")]
Pairs = Annotated[int, typer.Option("--pairs", min=1, help="Pairs of runs that are counted.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write the JSON to this file too.")]


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
    """Virtual ranks against one call of torch's attention, both with all threads."""
    from ringlab.bench.emulate import bench_emulate
    from ringlab.bench.work import Work

    with errors_told(as_json), progress_bar() as bar:
        task = bar.add_task("bench emulate", total=2 * (pairs + 2))
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
    """Gloo processes of one thread against one call of torch's attention with as many threads."""
    from ringlab.bench.processes import bench_processes
    from ringlab.bench.work import Work

    with errors_told(as_json):
        measured = bench_processes(Work(H=heads, S=tokens, D=head_dim), ranks, pairs)
    _report(measured, output, as_json)


def _report(measured: dict[str, Any], output: Path | None, as_json: bool) -> None:
    if output is not None:
        import json

        output.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(measured)
        return
    for name in ("forward", "forward_backward"):
        side = measured[name]
        label = name.replace("_", " + ")
        times = f"{side['subject_median_s']:.3f} s against {side['baseline_median_s']:.3f} s"
        people.print(f"{label:18} ratio {side['ratio']:.3f}   ({times}, medians of {len(side['subject_s'])})")
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
