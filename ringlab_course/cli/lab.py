"""`ringlab lab`: run an instructor's labs on several GPUs, or on gloo processes if there are no GPUs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ringlab.cli.output import Json, check_writable, finish, people, print_json, reporting_errors, stderr

if TYPE_CHECKING:
    from ringlab_course.lab.start import Cases, Settings, Start

app = typer.Typer(
    help="Labs on several ranks: on the GPUs of this machine, on gloo processes, or under torchrun on many machines.",
    no_args_is_help=True,
)
Output = Annotated[
    Path,
    typer.Option("--output", help="The result file; if it exists, the next free name, such as l1-2.json."),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks",
        min=2,
        help="P, the ranks started on this machine; under torchrun, its number of processes.",
    ),
]
Transport = Annotated[str, typer.Option("--transport", help="gloo, nccl, symmetric or shared-gpu.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Number of machines that must take part.")]
Busy = Annotated[bool, typer.Option("--allow-busy", help="Measure even if others use a device.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the result file, once this run is finished.")]
Connect = Annotated[
    float, typer.Option("--connect-timeout", min=1.0, help="Seconds for all ranks to join, under torchrun.")
]
Message = Annotated[
    float,
    typer.Option(
        "--message-timeout", min=1.0, help="Seconds for one message; a longer one counts as a hang."
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for the whole lab.")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="H, query heads.")]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, help="D.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Number of counted rounds.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the inputs.")]
Tokens = Annotated[int, typer.Option("--tokens", min=16, help="S, the global sequence length.")]
Block = Annotated[
    str, typer.Option("--block", help="The block backend: auto, native, cudnn, flash, flex, triton, …")
]


@app.command()
def preflight(
    ranks: Ranks = 2,
    transport: Transport = "gloo",
    nodes: Nodes = None,
    tokens: Tokens = 8192,
    timeout: Timeout = 120.0,
    connect_timeout: Connect = 120.0,
    as_json: Json = False,
) -> None:
    """Check versions, machines, devices, memory and one exchange, without measuring anything.

    Exits 1 if a lab could not start.
    """
    with reporting_errors(as_json):
        from dataclasses import asdict

        from ringlab_course.lab.l2 import L2
        from ringlab_course.lab.start import Start, look

        start = Start(Path(os.devnull), ranks, transport, nodes, timeout=timeout, connect=connect_timeout)
        everyone, found = look(L2(S=tokens), start)
    ok = all(each.ok for each in found)
    if _tells():
        if as_json:
            print_json({"ok": ok, "ranks": everyone, "findings": [asdict(each) for each in found]})
        else:
            table = Table("", "looked at", "found", "what to do")
            for each in found:
                mark = "✗" if not each.ok else "⚠" if each.doubtful else "✓"
                table.add_row(mark, each.name, each.told, each.remedy if mark != "✓" else "")
            people.print(table)
    finish(ok)


@app.command()
def l1(
    ranks: Ranks = 2,
    transport: Transport = "gloo",
    nodes: Nodes = None,
    allow_busy: Busy = False,
    messages: Annotated[str, typer.Option("--messages", help="Bytes of exchanges, with commas.")] = "4096,65536,1048576,4194304,16777216",
    lengths: Annotated[str, typer.Option("--lengths", help="c, tokens of blocks, with commas.")] = "256,512,1024,2048",
    heads: Heads = 8,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", min=1, help="K, as many as query heads.")] = None,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    rounds: Rounds = 11,
    seed: Seed = 0,
    output: Output = Path("results/l1.json"),
    timeout: Timeout = 3600.0,
    connect_timeout: Connect = 120.0,
    message_timeout: Message = 300.0,
    force: Force = False,
) -> None:  # fmt: skip
    """Measure bandwidth by size of message, and how much of a hop hides behind the computation of a block."""
    with reporting_errors(False):
        from ringlab_course.lab import l1 as lab
        from ringlab_course.lab.start import Start

        numbers = _numbers("--messages", messages), _numbers("--lengths", lengths)
        settings = lab.L1(
            *numbers, heads, heads if kv_heads is None else kv_heads, head_dim, dtype, rounds, seed
        )
        start = Start(
            output, ranks, transport, nodes, allow_busy, timeout, connect_timeout, force, message_timeout
        )
        _run("l1", lab.cases, settings, start)


@app.command()
def l2(
    ranks: Ranks = 2,
    transport: Transport = "gloo",
    nodes: Nodes = None,
    allow_busy: Busy = False,
    tokens: Tokens = 8192,
    per_rank: Annotated[int, typer.Option("--per-rank", min=16, help="c, tokens of each rank in weak scaling.")] = 2048,
    numbers: Annotated[str, typer.Option("--numbers", help="Numbers of ranks to measure; all powers of two if empty.")] = "",
    layouts: Annotated[str, typer.Option("--layouts", help="Layouts by name, with commas; all if empty.")] = "",
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    block: Block = "auto",
    rounds: Rounds = 7,
    seed: Seed = 0,
    output: Output = Path("results/l2.json"),
    timeout: Timeout = 3600.0,
    connect_timeout: Connect = 120.0,
    message_timeout: Message = 300.0,
    force: Force = False,
) -> None:  # fmt: skip
    """Measure how near each layout comes to a perfect split of the work, in strong and weak scaling."""
    with reporting_errors(False):
        from ringlab.layout import layout_names
        from ringlab_course.lab import l2 as lab
        from ringlab_course.lab.start import Start

        chosen = _numbers("--numbers", numbers) if numbers else ()
        names = tuple(name.strip() for name in layouts.split(",")) if layouts else layout_names()
        settings = lab.L2(tokens, per_rank, heads, head_dim, dtype, chosen, names, block, rounds, seed)
        _run(
            "l2",
            lab.cases,
            settings,
            Start(
                output, ranks, transport, nodes, allow_busy, timeout, connect_timeout, force, message_timeout
            ),
        )


@app.command()
def l3(
    targets: Annotated[list[str], typer.Argument(help="package.module:function, or peer:NAME.")],
    ranks: Ranks = 2,
    transport: Transport = "gloo",
    nodes: Nodes = None,
    allow_busy: Busy = False,
    tokens: Tokens = 8192,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    layout: Annotated[str, typer.Option("--layout", help="Of ringlab's own ring.")] = "zigzag",
    block: Block = "auto",
    rounds: Rounds = 11,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option("--output", help="A folder: a result file for each entrant.")] = Path("results/l3"),
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for each entrant.")] = 600.0,
    connect_timeout: Connect = 120.0,
    message_timeout: Message = 300.0,
    force: Force = False,
) -> None:  # fmt: skip
    """Make it faster: time each entrant against ringlab, in a run of its own.

    Entrants with wrong results are not ranked. Exits 1 if a run fails.
    """
    from ringlab_course.lab.start import under_torchrun

    if len(targets) > 1 and under_torchrun():
        raise typer.BadParameter(
            "give one entrant per torchrun, because a crash of one entrant would end the run of the others; on one machine, start without torchrun to run several",
            param_hint="TARGETS",
        )
    failed = 0
    for target in targets:
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", target)
        try:
            with reporting_errors(False):
                from ringlab_course.lab import l3 as lab
                from ringlab_course.lab.start import Start

                settings = lab.L3(target, tokens, heads, head_dim, dtype, layout, block, rounds, seed)
                file = output / f"{name}.json"
                start = Start(
                    file,
                    ranks,
                    transport,
                    nodes,
                    allow_busy,
                    timeout,
                    connect_timeout,
                    force,
                    message_timeout,
                )
                _run("l3", lab.cases, settings, start)
        except typer.Exit:  # the error has been printed; the next entrant still runs
            failed += 1
    finish(not failed)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Result files, or folders with some.")],
    output: Annotated[Path, typer.Option("--output", help="The page.")] = Path("results/report.html"),
    title: Annotated[str, typer.Option("--title", help="Of the page.")] = "Labs of ring attention",
) -> None:
    """Write one page from many result files, with plots and a leaderboard.

    It loads nothing from the network.
    """
    with reporting_errors(False):
        from ringlab_course.lab.report import report as page
        from ringlab_course.lab.result import load_all

        check_writable("--output", output, make_folder=True)
        found, others = load_all(results)
        text, left_out = page(found, title, others)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    for path, why in left_out.items():
        stderr.print(f"left out: {path}: {why}", style="red", highlight=False)
    runs = len(found) + len(others) - len(left_out)
    people.print(f"{output}: {runs} run{'s' if runs > 1 else ''}", highlight=False)


def _run(name: str, cases: Cases, settings: Settings, start: Start) -> None:
    from ringlab_course.lab.result import load
    from ringlab_course.lab.start import run

    def began(file: Path) -> None:  # results may be printed only after an hour
        stderr.print(
            f"{name}: measuring; {file} has every case as soon as it ends",
            highlight=False,
            soft_wrap=True,
        )

    written = run(name, cases, settings, start, began)
    if written is not None:
        found = load(written)
        people.print(found["label"], highlight=False)
        for case in found["cases"]:
            people.print(_line(case), highlight=False)
        people.print(f"{written}; ringlab lab report {written}", highlight=False)


def _line(case: dict[str, Any]) -> str:
    """Return a case of a lab as one line of text: its sizes and figures, without the individual times."""
    if "contenders" in case:
        parts = [
            f"{name} {_figures(each) if each['correct'] else 'WRONG'}"
            for name, each in case["contenders"].items()
        ]
        where = f"{case.get('scaling', case['case'])}, P={case['P']}, S={case['S']}, {case['pass'].replace('_', ' + ')}"
        return f"{where}: {', '.join(parts)}"
    shown = {k: v for k, v in case.items() if k not in ("case", "times_s")}
    return f"{case['case']}: " + ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()
    )


def _figures(each: dict[str, Any]) -> str:
    if "median_s" not in each:
        return "right"
    return f"{each['median_s'] * 1e3:.1f} ms {each.get('efficiency', each.get('score')):.2f}"


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} should be whole numbers with commas between them", param_hint=option
        ) from None


def _tells() -> bool:
    """Return whether this process prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":  # torchrun runs this file if the checkout is not installed
    app()
