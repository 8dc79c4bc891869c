"""docs/benchmarks.md: the committed measurements, read from benchmarks/results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringlab.cost.planner.plan import PUBLISHED as BESIDE_PLANS

from ..website.links import table
from .published_runs import NOT_ASKED, PAIRS, PUBLISHED, Published, compared

HEAD = """\
# Measured

All measured times and sizes: the ring beside torch and beside known packages, the simulator beside published runs, the commands, the
judge, the kernels. Compare ratios, not seconds: seconds belong to one machine. The files of `benchmarks/results` hold the machine, the
versions and the single timings. `ringlab bench all --output benchmarks/results` measures again what needs no GPU, and `make gpu` the rest.
"""
Result = dict[str, Any]


def page(root: Path) -> str:
    """Return the page for the checkout at `root`."""
    results = root / "benchmarks/results"
    sections = (
        _ring,
        _peers,
        _gpus,
        _training,
        _simulator,
        _commands,
        _published,
        _judge,
        _waiting,
        _kernels,
    )
    return "\n\n".join([HEAD.strip(), *(text for section in sections for text in section(results))]) + "\n"


def _ring(results: Path) -> Iterator[str]:
    yield "## The ring beside one call of torch's attention"
    emulated, processes = _read(results / "emulate-cpu.json"), _read(results / "processes-cpu.json")
    work = emulated["work"]
    memory = emulated["memory"]
    yield (
        f"Ratios of the ring's time to one call over the whole sequence: medians of {len(emulated['forward']['subject_s'])} "
        f"interleaved pairs, B={work['B']}, H={work['H']}, S={work['S']}, D={work['D']}, {work['dtype']}, causal, "
        f"{work['layout']}. The peak is a rank's memory beyond its shard, in tensors of S/P tokens: two K/V blocks (one in "
        "use, one on its way), in backward two blocks of gradients too, and the accumulators."
    )
    rows = [
        (
            f"{work['P']} virtual ranks (`ringlab bench emulate`)",
            *_ratios(emulated),
            " and ".join(f"{memory[name]['peak_shards']:.1f}" for name in ("forward", "forward_backward")),
        ),
        (
            "the same virtual ranks without messages and merges: the block alone on their tiles",
            *_ratios(emulated["block_alone"]),
            "",
        ),
        (
            f"{processes['work']['P']} gloo processes of one thread against two threads (`ringlab bench processes`)",
            *_ratios(processes),
            "",
        ),
    ]
    yield table(("", "forward", "forward + backward", "peak, forward and with backward"), rows)
    yield _machine(emulated)


def _ratios(measured: Result) -> tuple[str, str]:
    return f"{measured['forward_ratio']:.2f}", f"{measured['forward_backward_ratio']:.2f}"


def _peers(results: Path) -> Iterator[str]:
    yield "## Known packages on the same work"
    yield (
        "Their time over ringlab's, medians of rounds in which every package runs once, on gloo processes of one thread "
        "(`ringlab bench peers`). Above 1, ringlab is faster; close to 1 is a tie, in which the first place changes "
        "between rounds. A package is *wrong* if the error of a result against float64 "
        "is more than twice that of the plainest implementation in that dtype. Packages written for flash-attn's kernels run torch's "
        "flash operator for CPUs instead; float32 is outside what their own kernels take."
    )
    for name in ("float32", "bfloat16"):
        measured = _read(results / "peers" / f"{name}.json")
        cases = measured["cases"]
        head = ("", *(f"{case['P']} ranks, {case['pass'].replace('_', ' + ')}" for case in cases))
        rows = [
            (f"{peer} ({about.split(',')[0]})", *(_beside(case, peer) for case in cases))
            for peer, about in measured["about"].items()
        ]
        rounds = len(next(iter(cases[0]["contenders"].values()))["times_s"])
        yield f"**{name}**, {rounds} rounds:\n\n{table(head, rows)}"
        yield _machine(measured)


def _beside(case: Result, peer: str) -> str:
    found = case["contenders"].get(peer)
    if found is None:
        return "not run"
    return f"{found['ratio']:.2f}" + ("" if found["correct"] else ", wrong")


def _gpus(results: Path) -> Iterator[str]:
    yield "## On GPUs"
    files = sorted(results.glob("hour/*.json"))
    if not files:
        yield "Nothing has been measured on a GPU yet. `make gpu` measures on yours and writes the results."
    steps = [(file, each["result"]) for file in files for each in _read(file)["steps"].values()]
    for file, measured in steps:
        if (measured or {}).get("bench") not in ("kernels", "ring"):
            continue
        rows = [
            (
                f"{case['pass'].replace('_', ' + ')}, {'causal' if case['causal'] else 'full'}",
                name,
                f"{found['median_s'] * 1e3:.3f} ms",
                f"{found['tflops']:.0f} TFLOP/s",
                ", ".join(
                    f"{ratio:.2f} of {base}" for base, ratio in case["speed_ratio"].get(name, {}).items()
                ),
            )
            for case in measured["cases"]
            for name, found in case["contenders"].items()
        ]
        yield f"`{file.name}`, {measured['bench']}:\n\n{table(('', '', 'median', 'rate', 'speed'), rows)}"
        yield _machine(measured)


def _training(results: Path) -> Iterator[str]:
    measured = _read(results / "nn/loss-curves.json")
    recipe = measured["recipe"]
    yield "## Training"
    yield (
        f"Loss curves of {recipe['steps']} steps in float32 (`python -m tools.loss_curves FILE`): the largest relative "
        f"difference to one process. The text: {measured['text']['name']}."
    )
    rows = [(name, f"{value:.1e}") for name, value in measured["largest_relative_difference"].items()]
    yield table(("", "largest relative difference"), rows)
    yield _machine(measured)


def _simulator(results: Path) -> Iterator[str]:
    calibrated, large = (
        _read(results / "calibrate/two-processes.json"),
        _read(results / "simulate/many-ranks.json"),
    )
    work, asked = calibrated["work"], large["cases"][0]["simulated"]
    yield "## The simulator"
    yield (
        f"Beside real runs on {work['P']} gloo processes (`ringlab calibrate`), the predictions of {len(calibrated['cases'])} "
        f"cases are off by at most {calibrated['worst_relative_error']:.1%}."
    )
    yield _machine(calibrated)
    yield (
        f"Simulating one causal forward of {asked['tokens'] // 2**20}Mi tokens in equal shards, from the start of the process to its end "
        "(`ringlab bench simulator`):"
    )
    rows = [
        (
            f"{case['simulated']['ranks']:,}",
            f"{case['measured']['process_wall_s']:.1f} s",
            f"{case['wall_s']:.1f} s",
            f"{case['measured']['peak_rss_bytes'] / 2**20:.0f} MiB",
        )
        for case in large["cases"]
    ]
    yield table(("ranks", "process", "simulation alone", "memory"), rows)
    yield _machine(large)


def _commands(results: Path) -> Iterator[str]:
    measured = _read(results / "waiting/answers.json")
    cases = measured["cases"]
    yield "## The command line"
    yield f"From the start of the process to its end, medians of {len(cases[0]['wall_s'])} (`ringlab bench answers`):"
    rows = [(f"`{case['command']}`", f"{case['median_s']:.2f} s") for case in cases]
    yield table(("command", "time"), rows)
    yield _machine(measured)


def _published(results: Path) -> Iterator[str]:
    spans = " and ".join(
        f"the {found.runs} runs of {purpose} took {found.least:.2f} to {found.most:.2f} times as long as planned"
        for purpose, found in BESIDE_PLANS.items()
    )
    yield "## Plans beside published runs"
    yield (
        "Plans count what their assumptions name, and nothing else. No figure is fitted to a row of this table. The ratio is "
        "the published time over the plan's, or memory over memory: above 1, the run took longer than its plan, or needed more "
        f"memory. Of whole steps, {spans}; `ringlab plan` says so under every plan."
    )
    yield table(
        ("run", "figure", "published", "plan", "ratio", "what the plan leaves out"),
        [_beside_plan(row) for row in PUBLISHED],
    )
    yield "Where the figures are from, and the commands that print the plans':"
    by_command: dict[str, list[Published]] = {}
    for row in PUBLISHED:
        by_command.setdefault(row.command, []).append(row)
    yield "\n".join(
        f"- {rows[0].run} ({', '.join(row.measure.name for row in rows)}): {rows[0].source}.\n  `{command}`"
        for command, rows in by_command.items()
    )
    yield (
        "The speed of a ring over that of one GPU is 8 times the makespan of `ringlab simulate --tokens 8Ki --ranks 1 "
        "--hardware h800 --layout contiguous` over that of the ring, each with `--backward` where the row has it."
    )
    yield (
        "Two splits of one run on the same GPUs share much of what plans leave out, so their ratio is what a choice between "
        f"splits depends on. It was off by a factor of {min(it.factor for it in PAIRS):.2f} to {compared():.2f}, and in all pairs "
        "with Ulysses on one node of GPUs the ring was slower than planned. `ringlab plan` does not rank splits that differ by less."
    )
    yield table(
        ("pair", "published", "plans", "off by a factor of"),
        [(it.what, f"{it.times:.2f}", f"{it.planned:.2f}", f"{it.factor:.2f}") for it in PAIRS],
    )
    yield "Sources: " + "; ".join(dict.fromkeys(it.source for it in PAIRS)) + "."
    yield "Published figures that no plan can be asked for:"
    yield "\n".join(f"- {what}: {why}." for what, why in NOT_ASKED)


def _beside_plan(row: Published) -> tuple[str, ...]:
    written = row.measure.written.format
    return (
        row.run,
        row.measure.name,
        written(row.figure),
        written(row.planned),
        f"{row.ratio:.2f}",
        row.left_out,
    )


def _judge(results: Path) -> Iterator[str]:
    measured = _read(results / "judge/throughput.json")
    numpy, ring, flat = (measured[name] for name in ("numpy", "ring", "flat"))
    growth = [judge for name, judge in flat["memory"].items() if name.startswith("judge")]
    yield "## The judge"
    yield (
        f"On {measured['processes']} cores, {numpy['per_minute']:.0f} submissions of exercise {numpy['exercise']} a minute, and "
        f"{ring['per_minute']:.0f} of a ring on four ranks. A sandboxed worker is handed out in "
        f"{measured['handed_out_s']['numpy'] * 1e3:.0f} ms with NumPy, and in {measured['handed_out_s']['torch'] * 1e3:.0f} ms with PyTorch. Over "
        f"{flat['submissions']} submissions a judge process grew from {min(each['first_mib'] for each in growth):.0f} to "
        f"{max(each['last_mib'] for each in growth):.0f} MiB (`ringlab bench judge`)."
    )
    yield _machine(measured)


def _waiting(results: Path) -> Iterator[str]:
    lessons, checked = _read(results / "waiting/lessons.json"), _read(results / "waiting/check.json")
    seconds, first = lessons["seconds"], lessons["first_cell"]
    slowest, latest = max(seconds, key=seconds.__getitem__), max(first, key=first.__getitem__)
    yield "## How long one waits"
    yield (
        f"Of {len(seconds)} lessons run from top to bottom, the slowest ({slowest}) takes {seconds[slowest]:.0f} s. A first cell, which "
        f"imports what the lesson needs, takes {statistics.median(first.values()):.1f} s in the median and {first[latest]:.1f} s at most "
        f"({latest}); the kernel has started by then, which takes {lessons['kernel_start']:.1f} s (`ringlab bench lessons`)."
    )
    yield _machine(lessons)
    wrong = checked["wrong"]
    yield (
        f"`ringlab check {wrong['options']}` finds the first fault of a wrong ring in {wrong['median_s']:.0f} s, the median of "
        f"{len(wrong['seconds'])} of the suite's wrong rings (`ringlab bench check`). Right rings take:"
    )
    rows = [
        (f"`{case['target']}`", case["tier"], str(case["checks"]), f"{case['seconds']:.0f} s")
        for case in checked["cases"]
    ]
    yield table(("target", "tier", "checks", "time"), rows)
    yield _machine(checked)


def _kernels(results: Path) -> Iterator[str]:
    measured = _read(results / "kernels/offline.json")
    rows = measured["rows"]
    broken = sum(bool(row["broken"]) for row in rows)
    spilled = {
        name: max(row["spill_bytes"] for row in rows if belongs(row))
        for name, belongs in (
            ("16 bits", lambda row: not row["scores"] and row["dtype"] != "float32"),
            ("float32", lambda row: not row["scores"] and row["dtype"] == "float32"),
            ("soft cap or dropout", lambda row: row["scores"]),
        )
    }
    yield "## Kernels, compiled without a GPU"
    yield (
        f"Triton {measured['made_from']['triton']} compiles {len(rows)} kernels and launch configurations for "
        f"{', '.join(sorted({row['arch'] for row in rows}))} (`ringlab kernels --offline`). {broken} break a budget. Registers "
        f"spilled, in bytes a thread, at most: {', '.join(f'{most} ({name})' for name, most in spilled.items())}."
    )

    yield from _variants(_read(results / "kernels/variants.json"))


def _variants(compiled: Result) -> Iterator[str]:
    """Show the kernels of head dim 128: the shipped ones, and those that were compiled and left out."""
    rows = [row for row in compiled["rows"] if row["head_dim"] == 128 and "error" not in row]
    kernels = tuple(dict.fromkeys(row["kernel"] for row in rows))
    found = {(row["variant"], row["arch"], row["kernel"]): row for row in rows}
    places = dict.fromkeys((row["variant"], row["arch"]) for row in rows)
    yield (
        "[Variants that are left out](guide/triton.md#tried-and-left-out), for head dim 128 and 16-bit inputs (`python -m "
        "tests.blocks.kernel_variants`): warps, registers of a thread, its spilled bytes, instructions, and among these "
        "barriers, at which a warp waits for others or for a copy. Nothing has run."
    )
    yield table(
        ("variant", "", *(f"`{kernel}`" for kernel in kernels)),
        [
            (*place, *(_compiled(found[*place, name]) if (*place, name) in found else "" for name in kernels))
            for place in places
        ],
    )


def _compiled(row: Result) -> str:
    return ", ".join(
        f"{row[name]:,}" for name in ("warps", "registers", "spill_bytes", "instructions", "barriers")
    )


def _read(path: Path) -> Result:
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    return found


def _machine(measured: Result) -> str:
    machine = measured["machine"]
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    return (
        f"*{machine['processor']}, {machine['cores']} cores{gpus}, {machine['system']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['date'][:10]}.*"
    )
