"""Draws results: a bar chart for each result and a roofline chart for kernels, each described in words.

The roof comes from a table of GPU limits, indexed by the name of the GPU that torch reports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlab.errors import RinglabError
from ringlab.viz.style import GREY, HATCHES, INK, PALETTE, PAPER, QUIET, WIDE, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceiling:
    """The limits that the maker states: dense bf16 FLOP/s with float32 sums, and bytes/s of device memory.

    Both are upper limits at the highest clocks, which a GPU under load does not sustain.
    """

    flops: float
    bandwidth: float
    source: str


_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 data sheet; half of the figure with sparsity"
_H200 = "NVIDIA H200 data sheet; half of the figure with sparsity"

CEILINGS = {
    "NVIDIA A100-SXM4-40GB": Ceiling(312e12, 1.555e12, _A100),
    "NVIDIA A100-PCIE-40GB": Ceiling(312e12, 1.555e12, _A100),
    "NVIDIA A100-SXM4-80GB": Ceiling(312e12, 2.039e12, _A100),
    "NVIDIA A100 80GB PCIe": Ceiling(312e12, 1.935e12, _A100),
    "NVIDIA H100 80GB HBM3": Ceiling(989.5e12, 3.35e12, _H100),
    "NVIDIA H100 PCIe": Ceiling(756e12, 2.0e12, _H100),
    "NVIDIA H200": Ceiling(989.5e12, 4.8e12, _H200),
}


def ceiling(name: str) -> Ceiling | None:
    """Return the ceiling of the GPU that torch calls `name`, or None if the table does not contain it."""
    return CEILINGS.get(name)


Drawn = tuple["Figure", str]
Result = dict[str, Any]
DPI = 160


def draw_all(files: Sequence[Path], out: Path) -> list[tuple[Path, str]]:
    """Write the figures of `files` into `out`; return each PNG's path and a description of it.

    An SVG is written beside every PNG, and both contain the description. `figures.md` shows all pictures.
    Raises: RinglabError if there is nothing to draw, or a file is not a result of `ringlab bench`.
    """
    if not files:
        raise RinglabError("results of `ringlab bench … --output`", "no file", "name some, or measure first")
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, result in (each for file in files for each in _read(file)):
        for kind, draw in _DRAWERS[result["bench"]].items():
            with styled():
                figure, alt = draw(result)
                path = out / f"{name}-{kind}.png"
                _save(figure, alt, path)
            drawn.append((path, alt))
    pages = [f"![{alt}]({path.name})\n\n{alt}\n" for path, alt in drawn]
    (out / "figures.md").write_text("\n".join(pages), encoding="utf-8")
    return drawn


def _read(file: Path) -> list[tuple[str, Result]]:
    """Return the results in a file, each with a name for its pictures. `bench hour` writes several."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RinglabError(
            "a JSON file", f"{file}: {error}", "give files that `ringlab bench` wrote"
        ) from None
    if isinstance(result, dict) and result.get("bench") == "hour":
        parts = [step.get("result") or {} for step in result["steps"].values()]
        return [(f"{file.stem}-{part['bench']}", part) for part in parts if part.get("bench") in _DRAWERS]
    if not isinstance(result, dict) or result.get("bench") not in _DRAWERS:
        raise RinglabError(
            f"a result of {', '.join(_DRAWERS)}", str(file), "give files that `ringlab bench` wrote"
        )
    return [(file.stem, result)]


def _save(figure: Figure, alt: str, path: Path) -> None:
    figure.savefig(path, dpi=DPI, metadata={"Software": None, "Description": alt})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None, "Description": alt})


def _where(result: Result) -> str:
    """Return one line about the measurement, its machine and its date, after the result's `note` if any."""
    machine, work = result["machine"], result["work"]
    device = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    P = f", P={work['P']}" if "P" in work else ""
    sizes = f"{work['S']:,} tokens, {work['H']} heads, D={work['D']}{P}, {work['dtype']}"
    note = f"{result['note']}\n" if "note" in result else ""
    return f"{note}{device}; torch {machine['torch']}; {machine['date'][:10]}; {sizes}"


def _alt(text: str, result: Result) -> str:
    return f"{text} Measured on {_where(result)}.".replace("\n", "; ")


def time_bars(result: Result) -> Drawn:
    """Draw the times of the ring and of one call of torch on a CPU: medians, with a dot for every time."""
    names = {"forward": "forward", "forward_backward": "forward + backward"}
    who = {"emulate": "virtual ranks", "processes": "processes"}[result["bench"]]
    sides = {"subject": f"ring, {result['work']['P']} {who}", "baseline": "torch, one call"}
    figure = new_figure(WIDE)
    axes = figure.subplots()
    for index, (side, label) in enumerate(sides.items()):
        for place, of in enumerate(names):
            at = place + 0.38 * (index - 0.5)
            median, times = result[of][f"{side}_median_s"], result[of][f"{side}_s"]
            _bar(axes, at, median, index, label if place == 0 else None, 0.34, f"{median:.3f} s", max(times))
            axes.plot([at] * len(times), times, ".", color=INK, markersize=3, zorder=3)
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.set_ylabel("seconds (median; dots: each run)")
    ratios = [f"{label} {result[of + '_ratio']:.2f}" for of, label in names.items()]
    _finish(figure, axes, f"Time relative to one call: {', '.join(ratios)}", result)
    text = "; ".join(
        f"{label}: ring {result[of]['subject_median_s']:.3f} s, torch {result[of]['baseline_median_s']:.3f} s, "
        f"ratio {result[of + '_ratio']:.2f}"
        for of, label in names.items()
    )
    return figure, _alt(f"Bar chart of times in seconds. {text}.", result)


def speed_bars(result: Result) -> Drawn:
    """Draw the TFLOP/s of every contender, case by case."""
    cases = result["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["contenders"]))
    figure = new_figure((max(WIDE[0], 0.55 * len(cases) * len(names) + 2), WIDE[1] + 0.4))
    axes, width = figure.subplots(), 0.84 / max(1, len(names))
    for index, name in enumerate(names):
        for place, case in enumerate(cases):
            at = place + width * (index - (len(names) - 1) / 2)
            if name in case["not_timed"]:
                axes.text(at, 0, " not timed", rotation=90, ha="center", va="bottom", color=QUIET, fontsize=9)
            elif name in case["contenders"]:
                tflops = case["contenders"][name]["tflops"]
                first = all(name not in before["contenders"] for before in cases[:place])
                _bar(axes, at, tflops, index, name if first else None, 0.9 * width, _short(tflops))
    axes.set_xticks(range(len(cases)), [_title(case) for case in cases])
    axes.set_ylabel("TFLOP/s (median)")
    what = {"kernels": "Kernels on one GPU", "ring": "The ring on one GPU, and in one call"}[result["bench"]]
    _finish(figure, axes, f"{what}: higher is faster", result)
    text = "; ".join(f"{_title(case)}: {_in_words(case)}" for case in cases)
    return figure, _alt(f"Bar chart of TFLOP/s. {text}. {result['method']['flops']}.", result)


def ratio_bars(result: Result) -> Drawn:
    """Draw the speed of each subject relative to each of its baselines. The line at 1 marks equal speed."""
    cases = result["cases"]
    rows = [
        (f"{_title(case)}: {subject} / {baseline}", ratio, index)
        for index, case in enumerate(cases)
        for subject, beside in case["speed_ratio"].items()
        for baseline, ratio in beside.items()
    ]
    figure = new_figure((WIDE[0], 1.4 + 0.32 * max(1, len(rows))))
    axes = figure.subplots()
    for place, (_, ratio, index) in enumerate(rows):
        colour, hatch = PALETTE[index % len(PALETTE)], HATCHES[index % len(HATCHES)]
        axes.barh(place, ratio, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.6)
        # The text has a background, because it may overlap the line at 1.
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
        axes.annotate(
            f"{ratio:.2f}",
            (ratio, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox=paper,
        )
    axes.axvline(1.0, color=INK, linewidth=1.2)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("speed, relative (1: as fast; median of paired rounds)")
    _finish(figure, axes, "Relative speed", result, legend=False)
    text = "; ".join(f"{name} {ratio:.2f}" for name, ratio, _ in rows) or "nothing was compared"
    return figure, _alt(f"Bar chart of relative speeds, 1 is as fast. {text}.", result)


def roofline(result: Result) -> Drawn:
    """Draw TFLOP/s over operations per byte, and the GPU's ceiling if it is known."""
    cases, gpu = result["cases"], ", ".join(result["machine"]["gpus"])
    roof = ceiling(result["machine"].get("gpu", {}).get("name", gpu))
    names = list(dict.fromkeys(name for case in cases for name in case["contenders"]))
    figure = new_figure((WIDE[0], 4.6))
    axes = figure.subplots()
    markers, seen = ("o", "s", "^", "D", "v", "P", "X", "*"), set()
    for place, case in enumerate(cases):
        intensity = case["flops"] / case["least_bytes"]
        for name, found in case["contenders"].items():
            index = names.index(name)
            axes.plot(
                intensity, found["tflops"], markers[place % len(markers)], markersize=9, alpha=0.85,
                color=PALETTE[index % len(PALETTE)], markeredgecolor=INK, markeredgewidth=0.6,
                label=None if name in seen else name,
            )  # fmt: skip
            seen.add(name)
    for place, case in enumerate(cases):
        axes.plot([], [], markers[place % len(markers)], color=GREY, markeredgecolor=INK, label=_title(case))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    note = _draw_roof(axes, roof, gpu, [case["flops"] / case["least_bytes"] for case in cases])
    axes.set_xlabel("FLOP per byte (fewest bytes: each input read once, each result written once)")
    axes.set_ylabel("TFLOP/s (median)")
    _finish(figure, axes, "Roofline", result, outside=True)
    text = "; ".join(
        f"{_title(case)} at {case['flops'] / case['least_bytes']:.0f} FLOP per byte: {_in_words(case)}"
        for case in cases
    )
    return figure, _alt(f"Roofline, logarithmic axes. {note} {text}.", result)


def _draw_roof(axes: Axes, roof: Ceiling | None, gpu: str, intensities: list[float]) -> str:
    """Draw the ceilings, and return a sentence about them. For an unknown GPU, only return a sentence."""
    if roof is None:
        note = f"No ceilings: ringlab's table does not know {gpu or 'this machine'}."
        axes.text(0.01, 0.02, note, transform=axes.transAxes, color=QUIET, fontsize=9)
        return note
    ridge = roof.flops / roof.bandwidth
    left, right = min(ridge / 8, *intensities) / 2, max(ridge, *intensities) * 4
    axes.plot([left, ridge, right], [left * roof.bandwidth / 1e12, *[roof.flops / 1e12] * 2], color=INK)
    words = f"{roof.flops / 1e12:.0f} TFLOP/s and {roof.bandwidth / 1e12:.2f} TB/s"
    axes.text(
        right, roof.flops / 1e12 * 1.06, f"{words} ({roof.source})", ha="right", color=QUIET, fontsize=8.5
    )
    axes.set_ylim(top=roof.flops / 1e12 * 1.6)
    return f"Ceilings {words}, meeting at {ridge:.0f} FLOP per byte ({roof.source})."


def _bar(
    axes: Axes,
    at: float,
    height: float,
    index: int,
    label: str | None,
    width: float,
    words: str,
    above: float | None = None,
) -> None:
    """Draw one bar, with its number above the bar, or above the height `above`."""
    colour, hatch = PALETTE[index % len(PALETTE)], HATCHES[index % len(HATCHES)]
    axes.bar(at, height, width, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.6, label=label)
    top = (at, height if above is None else above)
    axes.annotate(words, top, (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=9)


def _finish(
    figure: Figure, axes: Axes, title: str, result: Result, legend: bool = True, outside: bool = False
) -> None:
    axes.set_title(title)
    if legend and axes.get_legend_handles_labels()[0]:
        where = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if outside else {"loc": "best"}
        axes.legend(**where, fontsize=9)
    axes.margins(y=0.12)
    figure.supxlabel(_where(result), fontsize=8, color=QUIET)


def _short(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _title(case: Result) -> str:
    return f"{case['pass'].replace('_', ' + ')}, {'causal' if case['causal'] else 'full'}"


def _in_words(case: Result) -> str:
    said = [f"{name} {_short(found['tflops'])} TFLOP/s" for name, found in case["contenders"].items()]
    return ", ".join(said + [f"{name} not timed" for name in case["not_timed"]]) or "nothing was timed"


_DRAWERS: dict[str, dict[str, Callable[[Result], Drawn]]] = {
    "emulate": {"bars": time_bars},
    "processes": {"bars": time_bars},
    "kernels": {"bars": speed_bars, "ratios": ratio_bars, "roofline": roofline},
    "ring": {"bars": speed_bars, "ratios": ratio_bars},
}
