"""Result files of labs on one page: plots, tables, and a leaderboard that ranks only correct entrants.

An entrant is compared with ringlab within one run, so the files may come from different machines. Runs with
the same work on the same machine have a leaderboard of their own. Files may come from anybody, so their text
is shown and never run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ringlab.bench.hour import expected
from ringlab.errors import LabError
from ringlab.layout import layout_names
from ringlab.viz.style import BLUE, GREEN, HATCHES, INK, ORANGE, PAPER, PURPLE, QUIET, RED, new_figure, styled
from ringlab_course.gradebook import readable
from ringlab_course.gradebook.pages import TEMPLATES, environment, rendered, require_pages
from ringlab_course.gradebook.plots import inline_svg

SIZE = (5.0, 3.2)
COLOURS = dict(zip(layout_names(), cycle((RED, ORANGE, BLUE, GREEN, PURPLE)), strict=False))
"""Colours by layout; other names in a file are grey."""


def link(cases: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """Return a plot of bandwidth over message size, both on logarithmic axes."""
    sizes, rates = [each["bytes"] for each in cases], [each["bytes_per_s"] / 1e9 for each in cases]
    said = ", ".join(f"{n:,} bytes {rate:.3g} GB/s" for n, rate in zip(sizes, rates, strict=True))
    with styled():
        figure = new_figure(SIZE)
        axes = figure.subplots()
        axes.loglog(sizes, rates, marker="o", color=BLUE)
        axes.set(xlabel="message, bytes each way", ylabel="GB/s each way")
    return inline_svg(figure, f"Bandwidth by message: {said}.", prefix)


def overlap(cases: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """Return a plot of the time of a block, of its hop and of both, over tokens.

    If the hop is fully hidden, both take as long as the longer one.
    """
    tokens = [each["tokens"] for each in cases]
    lines = (("compute", BLUE, "s"), ("exchange", ORANGE, "^"), ("both", INK, "o"))
    said = "; ".join(
        f"{each['tokens']} tokens: compute {each['compute_s'] * 1e3:.2f}, exchange {each['exchange_s'] * 1e3:.2f}, both {each['both_s'] * 1e3:.2f} ms"
        for each in cases
    )
    with styled():
        figure = new_figure(SIZE)
        axes = figure.subplots()
        for name, colour, marker in lines:
            axes.loglog(
                tokens, [each[f"{name}_s"] * 1e3 for each in cases], marker=marker, color=colour, label=name
            )
        axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
        axes.xaxis.minorticks_off()  # beside the measured lengths, their labels would overlap
        axes.set(xlabel="tokens of a block", ylabel="ms")
        axes.legend()
    return inline_svg(figure, said, prefix)


def efficiency(cases: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """Return a plot of each layout's efficiency with backward, by scaling and number of ranks."""
    both = [each for each in cases if each["pass"] == "forward_backward"] or list(cases)
    said = "; ".join(
        f"{each['scaling']}, {each['P']} ranks: "
        + ", ".join(f"{name} {one['efficiency']:.2f}" for name, one in each["contenders"].items())
        for each in both
    )
    names = list(dict.fromkeys(name for each in both for name in each["contenders"]))
    width = 0.8 / max(1, len(names))
    with styled():
        figure = new_figure(SIZE)
        axes = figure.subplots()
        for number, name in enumerate(names):
            at = [place + (number - (len(names) - 1) / 2) * width for place in range(len(both))]
            heights = [each["contenders"].get(name, {}).get("efficiency", 0.0) for each in both]
            axes.bar(
                at, heights, width * 0.92, label=name, color=COLOURS.get(name, QUIET), hatch=HATCHES[number % len(HATCHES)],
                edgecolor=PAPER, linewidth=0,
            )  # fmt: skip
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        places = [f"{each['scaling']}\n{each['P']} ranks" for each in both]
        axes.set_xticks(range(len(both)), places)
        axes.set(ylabel="efficiency, with backward")
        axes.grid(axis="x", visible=False)
        if names:
            axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15), fontsize=9)
    return inline_svg(figure, f"Efficiency with backward: {said}.", prefix)


SAME = 0.01
"""Scores that differ by less than this share count as equal: another run might reverse their order."""
OURS = "ringlab"
_OWN = Path(__file__).parent / "templates"


def report(
    results: Mapping[Path, Mapping[str, Any]],
    title: str = "Labs of ring attention",
    others: Mapping[Path, str] | None = None,
) -> tuple[str, dict[Path, str]]:
    """Return the page, and the files that it leaves out, each with the reason.

    others: files that are already left out. A file with incomplete cases is also left out, and named on
    the page.
    Raises: LabError if no file remains; MissingExtraError without Jinja2 or matplotlib.
    """
    require_pages()
    from jinja2 import FileSystemLoader

    runs: dict[Path, dict[str, Any]] = {}
    left_out = dict(others or {})
    for number, (path, found) in enumerate(results.items()):
        try:
            runs[path] = {"file": str(path), **_run(found, f"run{number}")}
            leaderboard({path: found})
        except Exception as error:  # whatever is wrong with a file, the other files are still shown
            runs.pop(path, None)
            left_out[path] = f"cases of {found['lab']}: {type(error).__name__}: {error}"
    if not runs:
        told = "; ".join(f"{path}: {why}" for path, why in left_out.items())
        raise LabError("a result file that can be shown", told or "none", "ringlab lab l1")
    shown = {path: found for path, found in results.items() if path in runs}
    among = environment().overlay(loader=FileSystemLoader([_OWN, TEMPLATES]))
    page = rendered(
        "report.html", among=among, title=title, runs=list(runs.values()), board=leaderboard(shown),
        left_out=[(str(path), readable.sentence(why)) for path, why in left_out.items()],
    )  # fmt: skip
    return page, left_out


def leaderboard(results: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a board for each machine, version and work of lab L3: correct entrants and wrong ones.

    The correct entrants are sorted, best first. An entrant's score is that of forward and backward together,
    from its best run. The entrant must be right in every pass of every run on that board. Entrants share a
    place if their scores are within a hundredth of the best score of that place.
    """
    boards: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for path, found in results.items():
        if found["lab"] != "l3":
            continue
        target = found["settings"]["target"]
        if not isinstance(target, str) or target == OURS:
            raise ValueError(f"no entrant: {target!r}")
        work = _settings({k: v for k, v in found["settings"].items() if k not in ("target", "rounds")})
        entries = boards.setdefault((_where(found), work), {})
        cases = [each for each in found["cases"] if each.get("case") == "contest"]
        for name in {target, *(name for each in cases for name in each["contenders"])}:
            entry = _entry(name, cases, path, found.get("ended_by", ""))
            entries[name] = _standing(entries.get(name), entry)
    return [
        {
            "where": where,
            "work": work,
            "ranked": _placed([e for e in entries.values() if e["right"]]),
            "wrong": [e for e in entries.values() if not e["right"]],
        }
        for (where, work), entries in boards.items()
    ]


def _standing(before: dict[str, Any] | None, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry that counts: a run in which the entrant was wrong, otherwise its best run.

    A wrong run counts because an entrant may be right in another run by luck.
    """
    if before is None:
        return entry
    return max(before, entry, key=lambda each: (each["off"], each["right"], each["score"]))


def _where(found: Mapping[str, Any]) -> str:
    """Return the machine and versions of a run.

    Entrants that were compared with another version of ringlab are on another board.
    """
    machine = found["machine"]
    code = found.get("code", {})
    versions = f"torch {machine.get('torch', '?')}, ringlab {code.get('commit') or code.get('ringlab', '?')}"
    if source := code.get("source"):
        versions += f", source {source}"
    on = f"{machine.get('processor', '')} {' '.join(machine.get('gpus', []))}"
    return ", ".join(map(readable.name, (found["label"], on, versions)))


def _placed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries sorted by score, each with its place."""
    placed: list[dict[str, Any]] = []
    first = math.inf
    for number, entry in enumerate(sorted(entries, key=lambda each: -float(each["score"])), start=1):
        shares = bool(placed) and entry["score"] >= first / (1 + SAME)
        first = first if shares else entry["score"]
        placed.append({**entry, "place": placed[-1]["place"] if shares else number})
    return placed


def _entry(name: str, cases: list[dict[str, Any]], path: Path, ended_by: str) -> dict[str, Any]:
    """Return the entry of one entrant in one run. It counts as right only if both passes were timed."""
    own = {each["pass"]: each["contenders"][name] for each in cases if name in each["contenders"]}
    wrong = [
        f"{result} off by {_number(one['errors'][result]):.2g}, {_number(one['bounds'][result]):.2g} are allowed ({of.replace('_', ' + ')})"
        for of, one in own.items()
        for result in one["errors"]
        if not _number(one["errors"][result]) <= _number(one["bounds"][result])
    ]
    off = bool(wrong)
    if not wrong and set(own) != {"forward", "forward_backward"}:
        wrong = [readable.legible(ended_by or "the run ended before both passes were timed")]
    both = own.get("forward_backward", {})
    score = _number(both.get("score", 0.0))
    if not wrong and math.isinf(score):
        wrong = ["its score is no number"]
    return {
        "name": name, "file": path.name, "right": not wrong, "off": off, "why": "; ".join(wrong[:2]),
        "score": score, "median_s": _number(both.get("median_s", 0.0)),
    }  # fmt: skip


def _number(value: Any) -> float:
    """Return a finite number as it is, and any other value as infinity, which no bound allows."""
    found = float(value)
    return found if math.isfinite(found) else math.inf


def _run(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    tables, figures = _SHOWN[found["lab"]](found["cases"], prefix)
    gpu = str(found["machine"].get("gpu", {}).get("name", ""))
    if rows := expected(f"lab {found['lab'].upper()}", found, gpu, len(found["ranks"])):
        tables.append(
            {
                "caption": "Beside what is expected of this GPU",
                "headings": ("", "measured", "expected", "unit", "source"),
                "rows": [
                    (row.name, f"{row.measured:.3g}", f"{row.expected:.3g}", row.unit, row.source)
                    for row in rows
                ],
            }
        )
    machine = {**found["machine"], **found.get("code", {})}
    return {
        **{name: found[name] for name in ("lab", "title", "label", "finished")},
        "target": found["settings"].get("target", ""),
        "ended_by": readable.legible(found.get("ended_by") or "ended without a word", 500),
        "tables": tables,
        "before": [
            readable.legible(each["told"], 500) for each in found.get("preflight", ()) if each.get("doubtful")
        ],
        "doubtful": any(DOUBTFUL in str(cell) for table in tables for row in table["rows"] for cell in row),
        "figures": figures,
        "topology": readable.legible(found.get("topology", "")),
        "stacks": [
            (f"Rank {rank}", readable.legible(text, 12_500))
            for rank, text in dict(found.get("stacks", {})).items()
        ],
        "facts": [("settings", _settings(found["settings"]))]
        + [(key, str(value)) for key, value in machine.items() if value]
        + [("ranks", ", ".join(str(each.get("id")) for each in found["ranks"]))]
        + [("preflight", f"{each['name']}: {each['told']}") for each in found.get("preflight", ())],
    }


def _settings(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in given.items())


DOUBTFUL = "\N{WARNING SIGN}"
MOST = 1.05
"""The largest overlap or efficiency that can be right: 1, with 5 % for noise.

No more than the whole hop can be hidden, and no ring is faster than a perfect split.
"""


def _marked(value: float, digits: int, least: float = -math.inf) -> str:
    """Return the value as text, with a mark if it cannot be right: above MOST, or below `least`."""
    return f"{value:.{digits}f}" + ("" if least <= value <= MOST else f" {DOUBTFUL}")


Shown = tuple[list[dict[str, Any]], list[tuple[str, Any]]]


def _l1(cases: list[dict[str, Any]], prefix: str) -> Shown:
    links = [each for each in cases if each["case"] == "bandwidth"]
    blocks = [each for each in cases if each["case"] == "overlap"]
    fitted = next((each for each in cases if each["case"] == "link"), None)
    least = next((each for each in cases if each["case"] == "threshold"), None)
    posted = all("host_s" in each for each in links)
    tables: list[dict[str, Any]] = [
        {
            "caption": "An exchange with both neighbours at once, each way"
            + (f": about {fitted['latency_s'] * 1e6:.0f} µs for the first byte, then {fitted['bytes_per_s'] / 1e9:.3g} GB/s{', the fastest message, for ' + str(fitted['unfit']) if 'unfit' in fitted else ''}" if fitted else ""),
            "headings": ("bytes", "median", "GB/s", *(("posted by Python in",) if posted else ())),
            "rows": [
                (f"{e['bytes']:,}", f"{e['median_s'] * 1e6:.0f} µs", f"{e['bytes_per_s'] / 1e9:.3g}", *((f"{e['host_s'] * 1e6:.0f} µs",) if posted else ()))
                for e in links
            ],
        },
        {
            "caption": "A block of c tokens, its hop, and both at once. Hidden is the part of the shorter of the two that costs no extra time: 1 is all of it"
            + (f". A hop hides from {float(least['tokens']):.0f} tokens, by these rates" if least else ""),
            "headings": ("c", "compute", "exchange", "both", "hidden"),
            "rows": [
                (f"{e['tokens']:,}", *(f"{e[name] * 1e3:.2f} ms" for name in ("compute_s", "exchange_s", "both_s")), _marked(e["hidden"], 2, least=-0.25))
                for e in blocks
            ],
        },
    ]  # fmt: skip
    figures: list[tuple[str, Any]] = []
    if links:
        figures.append(("Bandwidth by message", link(links, f"{prefix}-link")))
    if blocks:
        figures.append(("Computing, exchanging, both", overlap(blocks, f"{prefix}-overlap")))
    return tables, figures


def _l2(cases: list[dict[str, Any]], prefix: str) -> Shown:
    rows = [
        (f"{e['scaling']}, {e['pass'].replace('_', ' + ')}", e["P"], f"{e['S']:,}", name, f"{one['median_s'] * 1e3:.1f} ms",
         _marked(one["efficiency"], 3), f"{one['tflops_per_rank']:.3g}", "right" if one["correct"] else "WRONG")
        for e in cases if e["case"] == "scaling" for name, one in e["contenders"].items()
    ]  # fmt: skip
    headings = ("scaling", "ranks", "S", "layout", "median", "efficiency", "TFLOP/s a rank", "results")
    table = {
        "caption": "Efficiency: the time of a perfect split over the ring's; causal",
        "headings": headings,
        "rows": rows,
    }
    shown = [each for each in cases if each["case"] == "scaling"]
    figures = [("Efficiency by layout", efficiency(shown, f"{prefix}-efficiency"))] if shown else []
    return [table], figures


def _l3(cases: list[dict[str, Any]], prefix: str) -> Shown:
    rows = [
        (readable.name(name), e["pass"].replace("_", " + "), f"{one['median_s'] * 1e3:.1f} ms", f"{one['score']:.3f}",
         "right" if one["correct"] else "WRONG", f"{max(map(_number, one['errors'].values())):.2g}", one.get("calls_looked_at", 1))
        for e in cases if e["case"] == "contest" for name, one in e["contenders"].items()
    ]  # fmt: skip
    headings = ("entrant", "pass", "median", "score", "results", "largest error", "calls looked at")
    first = [
        (readable.name(name), e["pass"].replace("_", " + "), "right" if one["correct"] else "WRONG")
        for e in cases if e["case"] == "first call" for name, one in e["contenders"].items()
    ]  # fmt: skip
    if not rows and first:
        caption = "The first call of each, which nobody timed"
        return [{"caption": caption, "headings": ("entrant", "pass", "results"), "rows": first}], []
    return [{"caption": "Beside ringlab, in turn", "headings": headings, "rows": rows}], []


_SHOWN = {"l1": _l1, "l2": _l2, "l3": _l3}
