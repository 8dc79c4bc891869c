"""`ringlab simulate`: the timeline of ring attention on a cluster that need not exist.

The makespan and the timeline are printed first. `--details` adds the other numbers and all assumptions.
`--serve decode|prefill` simulates a step of serving instead. Files are checked before the simulation and
written after it.
"""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ringlab.cli.output import (
    Json,
    check_writable,
    finish,
    ignored,
    people,
    print_json,
    reporting_errors,
    stderr,
)
from ringlab.cost.units import nearest
from ringlab.errors import CostError, require_package

if TYPE_CHECKING:
    import numpy as np

    from ringlab.comm.clocked.timeline import Timeline
    from ringlab.cost.hardware import Hardware
    from ringlab.cost.simulate import Simulation
    from ringlab.cost.sizes import Attention
    from ringlab.layout import Layout
    from ringlab.mask import Mask

of_layer = partial(typer.Option, rich_help_panel="The layer")
of_cluster = partial(typer.Option, rich_help_panel="The cluster")
how_to_run = partial(typer.Option, rich_help_panel="The program")
written = partial(typer.Option, rich_help_panel="Output")
of_serving = partial(typer.Option, rich_help_panel="A step of serving")

Tokens = Annotated[str, of_layer(help="Tokens of the sequence: 131072, 128Ki, 16M.")]
ModelName = Annotated[str | None, of_layer(help="A model by name, or a TOML file, for heads and head dim.")]
Heads = Annotated[int | None, of_layer(help="Query heads; 32 by default.")]
KvHeads = Annotated[int | None, of_layer(help="Key/value heads; 8 by default.")]
HeadDim = Annotated[int | None, of_layer(help="Head dim; 128 by default.")]
Batch = Annotated[int, of_layer(help="Sequences at once.")]
Dtype = Annotated[str, of_layer(help="Dtype of q, k and v.")]
Full = Annotated[bool, of_layer("--full", help="No causal mask.")]
Window = Annotated[str | None, of_layer(help="A sliding window: the tokens that each row sees.")]
Documents = Annotated[
    str | None,
    of_layer(help="Lengths of packed documents, which do not see each other.", metavar="96Ki,16Ki,16Ki"),
]
HardwareName = Annotated[str, of_cluster(help="By name, or a TOML file.")]
Ranks = Annotated[int | None, of_cluster(help="Number of ranks; by default those of one node.")]
Nodes = Annotated[int | None, of_cluster(help="Number of nodes, instead of ranks.")]
Slow = Annotated[
    list[str] | None, of_cluster(help="Rank 3 computes 1.5 times longer; repeatable.", metavar="3=1.5")
]
Jitter = Annotated[float, of_cluster(help="Relative spread of computations (lognormal).")]
Seed = Annotated[int, of_cluster(help="Seed of the jitter.")]
LayoutName = Annotated[
    str, how_to_run("--layout", help="The layout, such as zigzag; an unknown name lists all.", metavar="NAME")
]
Chunk = Annotated[int | None, how_to_run(help="Tokens of a piece, for the layout dealt.")]
Folded = Annotated[bool, how_to_run("--folded", help="Deal forth and back, for the layout dealt.")]
Schedule = Annotated[
    str,
    how_to_run(
        help="How queries meet keys; degrees in parentheses: 'hybrid(ring=4, ulysses=2)'.",
        metavar="ring|allgather|ulysses|hybrid|double-ring|query-ring|burst|bidirectional|multi-ring",
    ),
]
Backward = Annotated[bool, how_to_run("--backward", help="Simulate forward and backward.")]
Tile = Annotated[str, how_to_run(help="Rows and keys of a kernel tile, or 'exact'.", metavar="128x128")]
Serve = Annotated[
    str | None,
    of_serving(
        help="Simulate a token of sequences of --tokens, or a chunk of --tokens of a prompt.",
        metavar="decode|prefill",
    ),
]
Prefix = Annotated[str | None, of_serving(help="Cached tokens before the chunk.")]
Queries = Annotated[
    str, of_serving(help="A token's queries on a rank: its own heads', or all.", metavar="own|all")
]
Travels = Annotated[
    str,
    of_serving(
        help="Whether K and V or queries travel for a chunk; auto: whichever are fewer bytes.",
        metavar="auto|kv|q",
    ),
]
Png = Annotated[Path | None, written(help="Draw the timeline as PNG.", metavar="FILE")]
Svg = Annotated[Path | None, written(help="Draw the timeline as SVG.", metavar="FILE")]
Perfetto = Annotated[Path | None, written(help="Events for ui.perfetto.dev.", metavar="FILE")]
Output = Annotated[
    Path | None, written(help="Write the JSON, with this machine and its memory.", metavar="FILE")
]
Details = Annotated[bool, typer.Option("--details", help="Also print every figure and all assumptions.")]


def simulate(
    context: typer.Context,
    tokens: Tokens = "128Ki",
    model: ModelName = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    full: Full = False,
    window: Window = None,
    documents: Documents = None,
    hardware: HardwareName = "h100",
    ranks: Ranks = None,
    nodes: Nodes = None,
    slow: Slow = None,
    jitter: Jitter = 0.0,
    seed: Seed = 0,
    layout: LayoutName = "zigzag",
    chunk: Chunk = None,
    folded: Folded = False,
    schedule: Schedule = "ring",
    backward: Backward = False,
    tile: Tile = "128x128",
    serve: Serve = None,
    prefix: Prefix = None,
    queries: Queries = "own",
    travels: Travels = "auto",
    png: Png = None,
    svg: Svg = None,
    perfetto: Perfetto = None,
    output: Output = None,
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Draw when every rank computes, sends and waits in a layer's attention.

    It runs the real program without data.
    """
    with reporting_errors(as_json):
        from ringlab.cost.hardware import hardware as hardware_of
        from ringlab.cost.simulate import check_amounts, runs_every_rank
        from ringlab.cost.simulate import simulate as simulated
        from ringlab.cost.units import kernel_tile
        from ringlab.cost.units import tokens as tokens_of

        machine, S = hardware_of(hardware), tokens_of(tokens, "--tokens")
        files = Files(png, svg, perfetto, output)
        files.check()
        serving = serving_of(context, serve, prefix, queries, travels)
        sizes = _sizes(model, heads, kv_heads, head_dim, batch, dtype, not full)
        mask = _mask(not full, window, documents, S)
        P = rank_count(ranks, nodes, machine)
        needed = "a tile as rows x keys, each from 1 to 2^20, or 'exact'"
        kernel = None if tile == "exact" else kernel_tile(tile, 10**9, needed)
        slowness = slow_ranks(slow or [])
        # Check first: a layout that is too large would take too long to make.
        check_amounts(S, P, kernel, sizes)
        lay = layout_of(layout, S, P, chunk, folded, mask)
        if serving is not None or runs_every_rank(lay, schedule, mask, backward, jitter):
            _announce(P, S if serving is None else 0, backward)
        how: dict[str, Any] = {"mask": mask, "schedule": schedule, "backward": backward, "tile": kernel}
        how |= {"slow": slowness, "jitter": jitter, "seed": seed}
        if serving is not None:
            done, (schedule, passes) = serving.run(sizes, S, P, machine, layout), serving.words
        else:
            done = simulated(sizes, lay, machine, **how)
            passes = "forward and backward" if backward else "forward"
        report = {
            "ok": True,
            **done.as_dict(),
            "simulated": {
                "tokens": S,
                "ranks": P,
                "nodes": -(-P // machine.ranks_per_node),
                "layout": serving.layout_words(lay) if serving is not None else repr(lay),
                "hardware": machine.name,
                "model": model,
                **{name: getattr(sizes, name) for name in ("B", "H", "K", "D", "dtype", "causal")},
                "window": mask.window,
                "documents": list(mask.documents),
                "schedule": schedule,
                "passes": passes,
                "tile": tile,
                "slow": {str(rank): factor for rank, factor in slowness.items()},
                "jitter": jitter,
                "seed": seed,
            },
            "assumptions": _assumptions(machine, kernel, schedule, serving),
        }
        report["written"] = files.write(done)
        files.publish(report)
    if as_json:
        print_json(report)
    else:
        show(people, done, report, details)
    finish(True)


def _announce(P: int, tokens: int, backward: bool, soon_s: float = 20.0) -> None:
    """Announce a long simulation in which every rank runs.

    Raises: CostError for too many ranks (see `check_ranks_that_run`).
    """
    from ringlab.cost.simulate import check_ranks_that_run, estimated_cpu_s

    check_ranks_that_run(P, tokens)
    if (estimate := estimated_cpu_s(P, backward)) > soon_s:
        stderr.print(f"{P} ranks: this may take up to {estimate:,.0f} s", highlight=False)


def _sizes(
    model: str | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    batch: int,
    dtype: str,
    causal: bool,
) -> Attention:
    from ringlab.cost.models import model as model_of
    from ringlab.cost.sizes import Attention

    given = {"H": heads, "K": kv_heads, "D": head_dim}
    own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if model is not None:
        return replace(model_of(model).attention(B=batch, dtype=dtype, causal=causal), latent=None, **own)
    if heads is not None and kv_heads is None and heads % 8:
        own["K"] = heads  # 8 key/value heads do not divide the query heads, so each query head gets its own
    return Attention(B=batch, dtype=dtype, causal=causal, **own)


def rank_count(ranks: int | None, nodes: int | None, machine: Hardware) -> int:
    """Return the number of ranks.

    Raises: CostError if ranks or nodes are below one, or if they contradict each other.
    """
    per_node = machine.ranks_per_node
    for name, value in (("ranks", ranks), ("nodes", nodes)):
        if value is not None and value < 1:
            raise CostError(f"{name} >= 1", f"{name}={value}", f"--{name} 1")
    if ranks is not None and nodes is not None and ranks != nodes * per_node:
        raise CostError(
            f"ranks equal to nodes × the {per_node} ranks of a node of {machine.name}",
            f"{ranks} ranks and {nodes} nodes",
            f"--nodes {-(-ranks // per_node)}, or --ranks {nodes * per_node}",
        )
    return ranks if ranks is not None else (nodes or 1) * per_node


def _mask(causal: bool, window: str | None, documents: str | None, S: int) -> Mask:
    from ringlab.cost.units import tokens
    from ringlab.mask import Mask

    lengths = tuple(tokens(each, "--documents") for each in documents.split(",")) if documents else ()
    reach = None if window is None else tokens(window, "--window")
    return Mask(causal, reach, documents=lengths).of_length(S)


def layout_of(name: str, S: int, P: int, chunk: int | None, folded: bool, mask: Mask) -> Layout:
    """Return the layout `name`.

    Raises: CostError for an unknown name, or for a chunk or fold with a layout that has none.
    """
    from ringlab.layout import dealt, get_layout, layout_names, per_document

    known = (*layout_names(), "per-document", "dealt")
    if name not in known:
        raise CostError(f"one of the layouts {', '.join(known)}", repr(name), nearest(name, known))
    if name == "dealt":
        if chunk is None or chunk < 1:
            raise CostError("chunk >= 1 for the layout dealt", f"chunk={chunk}", "--chunk 128")
        return dealt(S, P, chunk=chunk, folded=folded)
    if chunk is not None or folded:
        raise CostError("chunk and folded with the layout dealt only", f"layout {name}", "--layout dealt")
    return per_document(mask.documents or (S,), P) if name == "per-document" else get_layout(name, S, P)


def slow_ranks(texts: list[str]) -> dict[int, float]:
    """Return the slow ranks with their factors. Raises: CostError for a text other than rank=factor."""
    slow = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError:
            raise CostError("a slow rank as rank=factor", repr(text), "--slow 3=1.5") from None
    return slow


def _assumptions(
    machine: Hardware, kernel: tuple[int, int] | None, schedule: str, serving: Serving | None
) -> list[str]:
    from ringlab.cost.simulate import MESSAGES_ASSUMED, messages_of

    reached = machine.reached
    counted = "visible pairs only" if kernel is None else "whole kernel tiles unless wholly masked"
    return [
        f"blocks take the time measured for {machine.name}"
        if machine.block_times
        else f"kernels reach {reached.attention_forward:.0%} (forward) and {reached.attention_backward:.0%}"
        f" (backward) of the dense peak; {counted}; launches, merges and sums take nothing",
        "a message starts when both its ends are posted and takes bytes/bandwidth + latency;"
        " one port inside the node and one between nodes for each rank, each one message at a time",
        *(MESSAGES_ASSUMED[messages_of(schedule)] if serving is None else ()),
        "communication takes nothing away from computation",
        "one layer's attention; q, k and v themselves do not count in peak_bytes"
        if serving is None
        else serving.assumed,
    ]


STEPS = ("decode", "prefill")
QUERIES, TRAVELS = ("own", "all"), ("auto", "kv", "q")


@dataclass(frozen=True)
class Serving:
    """One step of serving: a token, or a chunk after `prefix` cached tokens, of each of `batch` sequences.

    queries: as in `decode_heads`. travels: as in `prefill`.
    Raises: CostError for an unknown step, or for an option that the step does not have.
    """

    step: str
    prefix: int = 0
    queries: str = "own"
    travels: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("step", STEPS), ("queries", QUERIES), ("travels", TRAVELS)):
            value = getattr(self, name)
            if value not in known:
                raise CostError(f"{name} among {', '.join(known)}", repr(value), nearest(value, known))
        if self.step == "decode" and (self.prefix or self.travels != "auto"):
            raise CostError("--prefix and --travels only with --serve prefill", f"--serve {self.step}")
        if self.step == "prefill" and self.queries != "own":
            raise CostError("--queries only with --serve decode", f"--serve {self.step}")

    @property
    def words(self) -> tuple[str, str]:
        """Return the program and its step in words."""
        if self.step == "decode":
            return f"decode_heads(queries={self.queries!r})", "one token of each sequence"
        return f"prefill(travels={self.travels!r})", f"a chunk after {self.prefix:,} tokens"

    def layout_words(self, layout: Layout) -> str:
        """Return a description of where the tokens are: in pages or, for a chunk, under `layout`."""
        from ringlab.cost.simulate_serving import PAGE

        return f"pages of {PAGE} tokens" if self.step == "decode" else repr(layout)

    @property
    def assumed(self) -> str:
        """Return a sentence about how the cache is assumed to be filled."""
        whose = "all tokens" if self.step == "decode" else "a rank's tokens"
        return (
            "one layer's attention; K and V are read at the memory's bandwidth; the cache is filled before, in no time, from K and V "
            f"of {whose}, which count in peak_bytes"
        )

    def run(self, sizes: Attention, tokens: int, P: int, hardware: Hardware, layout: str) -> Simulation:
        """Return the simulation of sequences of `tokens` tokens each, or of a chunk of `tokens` tokens.

        Raises: CostError for amounts that cannot be simulated; ShapeError for heads that ranks cannot share.
        """
        from ringlab.cost.simulate_serving import simulate_decode, simulate_prefill

        if self.step == "decode":
            one = replace(sizes, B=1)
            return simulate_decode(one, [tokens] * sizes.B, P, hardware, queries=self.queries)
        how: dict[str, Any] = {"travels": self.travels, "layout": layout}
        return simulate_prefill(sizes, self.prefix, tokens, P, hardware, **how)


OF_SERVING = ("prefix", "queries", "travels")
NOT_OF_SERVING = (
    "full",
    "window",
    "documents",
    "slow",
    "jitter",
    "seed",
    "chunk",
    "folded",
    "schedule",
    "backward",
    "tile",
)


def serving_of(
    context: typer.Context, step: str | None, prefix: str | None, queries: str, travels: str
) -> Serving | None:
    """Return the step of serving that --serve names, or None without --serve.

    Raises: CostError for an option of serving without --serve, or for an option that serving does not have.
    """
    from ringlab.cost.units import tokens

    if given := ignored(context, OF_SERVING if step is None else NOT_OF_SERVING):
        beside = f"{given} with --serve" if step is None else f"--serve without {given}"
        raise CostError(
            beside,
            "no --serve" if step is None else "both",
            "leave one of them out" if step else "--serve prefill",
        )
    if step is None:
        return None
    return Serving(step, tokens(prefix, "--prefix") if prefix is not None else 0, queries, travels)


COMPUTES, SOME, WAITS, ENDED = "█", "▒", "·", " "


def show(console: Console, done: Simulation, report: dict[str, Any], details: bool) -> None:
    """Print the makespan and a row of characters for each rank; with `details` also all other numbers."""
    from ringlab.cost.simulate import shown_ranks
    from ringlab.cost.units import short

    P, asked = done.P, report["simulated"]
    shown = shown_ranks(P)

    def say(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(
        f"Makespan {short(done.makespan_s, 'seconds')}, {short(done.exposed_s, 'seconds')} of it for communication "
        f"that nothing hides; ranks compute {done.busy_fraction:.1%} of the time"
    )
    say(
        f"{asked['layout']} on {P} × {asked['hardware']}, {asked['schedule']}, {asked['passes']}: "
        f"B={asked['B']} H={asked['H']} K={asked['K']} D={asked['D']} {asked['dtype']}, "
        f"{'causal' if asked['causal'] else 'no mask'}"
        + (f", window {asked['window']:,}" if asked["window"] else "")
        + (f", {len(asked['documents'])} documents" if asked["documents"] else "")
    )
    say()
    wide = max(20, min(100, console.width - 12))
    if len(shown) < P:
        say(f"{len(shown)} of {P} ranks, evenly spread")
    for rank in shown:
        say(f"rank {rank:>5} {strip(done.timeline, rank, wide)}")
    say(
        f"{'':10} 0{short(done.makespan_s, 'seconds'):>{wide - 1}}   {COMPUTES} computes  {SOME} computes less than half of it  {WAITS} waits"
    )
    for kind, file in report["written"].items():
        say(f"  {kind}: {file}")
    say()
    if not details:
        say(
            "More, with --details: memory, bytes, the busiest and the longest waiting rank, and what is assumed"
        )
        return
    rows = [
        ("makespan", short(done.makespan_s, "seconds")),
        ("exposed communication", short(done.exposed_s, "seconds")),
        ("ranks compute", f"{done.busy_fraction:.1%} of the time"),
        (
            "least and most busy rank",
            f"{short(min(done.busy_s), 'seconds')}, {short(max(done.busy_s), 'seconds')}",
        ),
        ("longest waiting rank", short(max(done.waited_s), "seconds")),
        ("peak memory of a rank", short(int(done.peak_bytes.max()), "bytes")),
        ("bytes sent, all ranks", short(report["bytes_sent"], "bytes")),
        ("simulated in", f"{done.wall_s:.2f} s"),
    ]
    for name, value in rows:
        say(f"{name:>26}  {value}")
    say()
    for assumption in report["assumptions"]:
        say(f"  assumed: {assumption}")


def strip(timeline: Timeline, rank: int, wide: int) -> str:
    """Return `wide` characters for the main activity of `rank` in each part of the makespan.

    SOME means that the rank computes in more than 5 % of the part, but mainly does something else.
    """
    import numpy as np

    from ringlab.comm.clocked.log import COMPUTE, WAIT

    starts, kinds, ends = timeline.strip(rank)
    edges = np.linspace(0.0, timeline.makespan_s, wide + 1)

    def seconds(kind: int) -> np.ndarray:
        """Return the seconds of this kind between successive edges."""
        chosen = kinds == kind
        begin, end = starts[chosen], ends[chosen]
        done = np.concatenate([[0.0], np.cumsum(end - begin)])
        full = np.searchsorted(end, edges, side="right")
        partial = np.zeros(len(edges))
        inside = full < len(begin)
        partial[inside] = np.maximum(0.0, edges[inside] - begin[full[inside]])
        return np.diff(done[full] + partial)

    busy, waiting = seconds(COMPUTE), seconds(WAIT)
    cell = timeline.makespan_s / wide
    idle = cell - busy - waiting
    choice = np.argmax([busy, waiting, idle], axis=0)
    # A cell of the timeline with many short computations is not drawn as idle, even if the
    # computations fill less than half of the cell.
    choice[(choice > 0) & (busy > 0.05 * cell)] = 3
    return "".join((COMPUTES, WAITS, ENDED, SOME)[i] for i in choice)


@dataclass(frozen=True)
class Files:
    """The paths of the pictures, the events and the result. None means that a file is not written."""

    png: Path | None = None
    svg: Path | None = None
    perfetto: Path | None = None
    output: Path | None = None

    def check(self) -> None:
        """Check before the simulation that the files can be written, so that no long simulation is lost.

        Raises: CostError for a file that cannot be written; MissingExtraError without matplotlib.
        """
        if self.png or self.svg:
            require_package("matplotlib", "figures", "--png and --svg")
        for name, path in vars(self).items():
            if path is not None:
                check_writable(f"--{name}", path, make_folder=name == "output")

    def write(self, done: Simulation) -> dict[str, Any]:
        """Write pictures and events. Return the files, and the ranks that they show.

        Raises: CostError if a file cannot be written.
        """
        files = {"png": self.png, "svg": self.svg, "perfetto": self.perfetto}
        written: dict[str, Any] = {kind: str(path) for kind, path in files.items() if path}
        if not written:
            return {}
        from ringlab.cost.simulate import shown_ranks

        shown = shown_ranks(done.P)
        trace = done.timeline.trace(shown)
        try:
            if self.png or self.svg:
                from ringlab.viz import gantt

                figure = gantt.figure(trace, ranks=shown)
                for kind, path in (("png", self.png), ("svg", self.svg)):
                    if path:
                        figure.savefig(path, format=kind, bbox_inches="tight")
            if self.perfetto:
                trace.to_chrome(self.perfetto)
        except OSError as error:
            raise CostError(f"files that can be written: {', '.join(written.values())}", f"{error}") from None
        return {**written, "ranks": shown}

    def publish(self, report: dict[str, Any]) -> None:
        """Write the result, the time and memory that this run took, and a description of the machine.

        Raises: CostError if the file cannot be written.
        """
        if self.output is None:
            return
        from ringlab.bench.device import machine

        usage = resource.getrusage(resource.RUSAGE_SELF)
        measured = {
            "process_cpu_s": time.process_time(),
            "load_average": os.getloadavg()[0],  # other processes increase wall_s and cpu_s
            "peak_rss_bytes": usage.ru_maxrss * 1024,
            "machine": machine(),
        }
        text = json.dumps({**report, "measured": measured}, indent=2, ensure_ascii=False) + "\n"
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CostError(f"a file that can be written at {self.output}", f"{error.strerror}") from None
