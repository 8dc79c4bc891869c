"""`ringlab calibrate`: measure this machine, write its hardware file, and set the simulator beside the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ringlab.cli.output import Json, check_writable, errors_told, people, print_json
from ringlab.errors import CostError

DEFAULT = Path("this-machine.toml")


def calibrate(
    ranks: Annotated[int, typer.Option("--ranks", help="P, processes of one thread each.")] = 2,
    tokens: Annotated[
        str, typer.Option("--tokens", help="S, lengths of the compared rings.")
    ] = "4096,6144,8192",
    heads: Annotated[int, typer.Option("--heads", help="H, query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="K, as many as query heads.")] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", help="D.")] = 64,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds that are counted.")] = 9,
    name: Annotated[str, typer.Option("--name", help="What the hardware is called.")] = "this-machine",
    hardware: Annotated[Path, typer.Option("--hardware", help="The hardware file to write.")] = DEFAULT,
    replace: Annotated[bool, typer.Option("--replace", help="Replace that file if it is there.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Write the JSON to this file too.")] = None,
    as_json: Json = False,
) -> None:
    """Measure tiles, links and the ring on this machine; write a hardware file; compare with the simulator."""
    with errors_told(as_json):
        from ringlab.bench.calibrate import calibrate as run
        from ringlab.cost.hardware import write_hardware
        from ringlab.cost.sizes import Attention
        from ringlab.cost.units import tokens as count

        if hardware.exists() and not replace:
            raise CostError(
                "a new file for the hardware",
                f"{hardware}, which exists",
                "--replace, or --hardware another.toml",
            )
        check_writable("--hardware", hardware)
        if output is not None:
            check_writable("--output", output, make_folder=True)
        lengths = tuple(count(part) for part in tokens.split(","))
        sizes = Attention(1, heads, kv_heads or heads, head_dim, dtype)
        found, report = run(sizes, ranks, lengths, rounds, name)
        write_hardware(hardware, found)
    if output is not None:
        import json

        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    report = {**report, "hardware_file": str(hardware)}
    if as_json:
        print_json(report)
        return
    _print(report)


def _print(report: dict[str, Any]) -> None:
    people.print(report["title"], markup=False, highlight=False)
    for of, block in report["block_times"].items():
        people.print(f"{of:9} {block}", markup=False, highlight=False)
    people.print(f"{'link':9} {report['link']}", markup=False, highlight=False)
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
    people.print(
        f"written: {report['hardware_file']}; use it as --hardware {report['hardware_file']}", markup=False
    )
