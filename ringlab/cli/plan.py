"""`ringlab plan`: whether and how a context fits on a cluster, how fast it is, and what limits it.

The answer is printed first. `--details` adds the memory item by item, the time of a layer, the other ways to
share the work, and all assumptions. `--bound` computes a bound that a paper states. `--list` prints the
tables that plans use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ringlab.cli.output import Json, finish, people, print_json, reporting_errors
from ringlab.cost import units
from ringlab.cost.units import counted, duration, in_percent, nearest, quantity, short
from ringlab.errors import CostError

if TYPE_CHECKING:
    from ringlab.cost.hardware import Hardware, Link
    from ringlab.cost.planner import Plan, Request
    from ringlab.cost.planner.ring_table import RingTable
    from ringlab.cost.planner.search import Candidate
    from ringlab.cost.planner.serve_time import DecodeTime
    from ringlab.cost.planner.step_time import StepTime

asked = partial(typer.Option, rich_help_panel="The request")
split = partial(typer.Option, rich_help_panel="The split (by default the fastest that fits)")
of_bound = partial(typer.Option, rich_help_panel="Bounds of papers")

Tokens = Annotated[str | None, asked(help="Tokens of one sequence: 131072, 128Ki, 1M.")]
ModelName = Annotated[str | None, asked(help="A model by name (--list), or a TOML file.")]
HardwareName = Annotated[str | None, asked(help="Hardware by name (--list), or a TOML file.")]
Inference = Annotated[
    str | None,
    asked(
        help="Plan inference instead of training: a prompt, a token, or both.", metavar="prefill|decode|serve"
    ),
]
PerNode = Annotated[int | None, asked(help="GPUs in a node, if not the hardware's own.")]
Generated = Annotated[
    str | None, asked(help="With serve: the number of generated tokens; the others are the prompt.")
]
Chunk = Annotated[
    str | None, asked(help="With serve: tokens of a prompt that are fed at once; 8Ki by default.")
]
Sharing = Annotated[
    str | None,
    split(help="With serve: how ranks that share sequences share the weights.", metavar="copies|dcp|helix"),
]
LogitsChunk = Annotated[
    str | None, split(help="Tokens whose logits are in memory at once; by default all of a rank's.")
]
FfnChunk = Annotated[
    str | None, split(help="Tokens whose feed-forward is computed at once; by default all of a rank's.")
]
Dp = Annotated[int | None, split(help="Replicas, each with sequences of its own.")]
Fsdp = Annotated[int | None, split(help="Ranks that share one copy of weights and optimizer.")]
Tp = Annotated[int | None, split(help="Tensor-parallel degree.")]
Cp = Annotated[int | None, split(help="Ranks that share one sequence: ring × ulysses.")]
RingDegree = Annotated[int | None, split(help="Ranks of a ring.")]
Ulysses = Annotated[int | None, split(help="Ranks of a Ulysses group.")]
Recomputation = Annotated[
    str | None, split(help="The activations computed again in backward.", metavar="none|selective|full")
]
LayoutName = Annotated[
    str | None, split(help="The layout, such as zigzag; an unknown name lists all.", metavar="NAME")
]
Ep = Annotated[int | None, split(help="Ranks that share the experts of a layer.")]
Pp = Annotated[int, split(help="Stages of a pipeline, one micro-batch per sequence.")]
Interleave = Annotated[int, split(help="Chunks of layers on each stage: a shorter bubble.")]
Offload = Annotated[
    str,
    split(
        help="Keep activations, optimizer (with gradients) or weights in the host's memory; several, joined by commas.",
        metavar="none|activations,…",
    ),
]
Tile = Annotated[
    str | None, split(help="Rows and keys of a kernel tile; 128x128 by default.", metavar="128x128")
]
Bound = Annotated[
    str | None, of_bound(help="Compute a paper's bound instead.", metavar="striped|ring|context")
]
Ranks = Annotated[int | None, of_bound(help="Ranks of the bound.")]
Bandwidth = Annotated[
    str | None, of_bound(help='One way, instead of the link\'s: "12.5 GB/s".', metavar="<rate>")
]
Weight = Annotated[float, of_bound(help="Cost of a FLOP of attention relative to one of a matrix.")]
Details = Annotated[
    bool,
    typer.Option(
        "--details",
        help="Also print the memory item by item, the time of a layer, other ways, and all assumptions.",
    ),
]
WhichLink = Annotated[str, of_bound(help="The link of the bound: inside or between nodes.")]


def plan(
    model: ModelName = None,
    tokens: Tokens = None,
    hardware: HardwareName = None,
    nodes: Annotated[int, asked(help="Number of nodes.")] = 1,
    gpus_per_node: PerNode = None,
    batch: Annotated[int, asked(help="Sequences in a step, on all GPUs.")] = 1,
    inference: Inference = None,
    generated: Generated = None,
    chunk: Chunk = None,
    dtype: Annotated[str, asked(help="Dtype of weights and activations.")] = "bfloat16",
    causal: Annotated[bool, asked(help="Mask the future.")] = True,
    reserve: Annotated[float, asked(help="Fraction of the memory to leave unused.")] = 0.06,
    dp: Dp = None,
    fsdp: Fsdp = None,
    tp: Tp = None,
    cp: Cp = None,
    ring: RingDegree = None,
    ulysses: Ulysses = None,
    ep: Ep = None,
    sharing: Sharing = None,
    recomputation: Recomputation = None,
    layout: LayoutName = None,
    pp: Pp = 1,
    interleave: Interleave = 1,
    offload: Offload = "none",
    logits_chunk: LogitsChunk = None,
    ffn_chunk: FfnChunk = None,
    tile: Tile = None,
    bound: Bound = None,
    ranks: Ranks = None,
    attention_weight: Weight = 1.0,
    link: WhichLink = "inside",
    bandwidth: Bandwidth = None,
    show: Annotated[
        bool, typer.Option("--list", help="List models and hardware with their sources.")
    ] = False,
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Size a cluster: whether a context fits, with which layout and split, how fast, and what limits it.

    ringlab plan --model llama3-70b --tokens 1M --hardware h100 --nodes 8 --logits-chunk 4Ki
    """
    with reporting_errors(as_json):
        if show:
            return show_tables(as_json)
        edges = None
        if tile is not None:
            from ringlab.cost.planner.request import MOST_OF_A_COUNT

            needed = f"a tile of rows x keys, both from 1 to {MOST_OF_A_COUNT:,}"
            edges = units.kernel_tile(tile, MOST_OF_A_COUNT, needed)
        length = _tokens(tokens)
        if bound is not None:
            given = BoundOptions(
                model, length, hardware, ranks, attention_weight, edges, link, bandwidth, dtype
            )
            return show_bound(bound, given, as_json)
        _need(model=model, tokens=tokens, hardware=hardware)
        from ringlab.cost.planner import Request
        from ringlab.cost.planner.request import CHUNK

        request = Request(
            model or "",
            length or 0,
            hardware or "",
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            batch=batch,
            purpose=inference or "training",
            dtype=dtype,
            dp=dp,
            fsdp=fsdp,
            tp=tp,
            cp=cp,
            ring=ring,
            ulysses=ulysses,
            recomputation=recomputation,
            layout=layout,
            causal=causal,
            tile=edges or (128, 128),
            logits_chunk=_tokens(logits_chunk),
            reserve=reserve,
            pp=pp,
            interleave=interleave,
            offload=offload,
            generated=_tokens(generated, 0),
            chunk=_tokens(chunk, CHUNK),
            sharing=sharing,
            ep=ep,
            ffn_chunk=_tokens(ffn_chunk),
        )
        _answer(request, details, as_json)


def _answer(request: Request, details: bool, as_json: bool) -> None:
    from ringlab.cost.planner import plan as plan_of

    found = plan_of(request)
    if as_json:
        print_json(found.as_dict())
    else:
        show(found, details)
    finish(found.fits)


def _tokens(text: str | None, default: Any = None) -> Any:
    """Return the number of tokens that `text` names, or the default if there is no text."""
    return default if text is None else units.tokens(text)


def _need(**given: str | None) -> None:
    for name, value in given.items():
        if value is None:
            raise typer.BadParameter("is missing; --list shows models and hardware", param_hint=f"--{name}")


WORDS = (
    "ring: ranks that hand K/V from one to the next; ulysses: ranks that trade tokens for heads by all-to-all; cp: both",
    "tp: ranks that share heads and feed-forward; dp: replicas with sequences of their own; pp: stages of a pipeline",
    "fsdp: ranks that share one copy of weights, gradients and optimizer; recomputed: what the backward computes again",
    "ep: ranks that share the experts of a layer, to which tokens are sent by all-to-all",
)

SERVING_WORDS = (
    "tp: ranks that share heads; cp: ranks that share a sequence's tokens; dp: replicas with sequences of their own",
    "copies: every rank of a cp group has all weights of its tp part; dcp: tp × cp ranks share the weights, and queries are "
    "gathered (decode context parallelism); helix: they share them, and queries are computed where they are needed",
)


CHANGES_SHOWN = 3  # without --details
MOST_ALIKE = 5  # the most rows in the table of other ways that take about as long as the plan
LARGEST_SHOWN = 4  # the number of entries of the memory table that are shown without --details


def show(plan: Plan, details: bool) -> None:
    """Print the plan: the answer, what to change and, with `details`, the tables behind the answer."""
    people.print(Text(plan.answer, style="bold green" if plan.fits else "bold red"))
    for line in _first_lines(plan):
        people.print(Text(line))
    if details:
        people.print()
        people.print(_memory(plan))
        people.print()
        people.print(_time(plan))
        for line in _hidden(plan):
            people.print(Text(line))
    else:
        people.print(Text(_largest(plan)))
        if plan.hidden:
            people.print(Text(_hidden_passes(plan)))
    if plan.alike:
        people.print(Text(_alike(plan)))
    _changes(plan, len(plan.suggestions) if details else CHANGES_SHOWN)
    if not details:
        people.print(Text(f"\nMore, with --details: {_left_out(plan)}", style="dim"))
        return
    _alternatives(plan)
    words = SERVING_WORDS if plan.serving else WORDS
    for heading, sentences in (("Assumed", plan.assumptions), ("Words", words)):
        people.print(Text(f"\n{heading}", style="bold"))
        for sentence in sentences:
            _item("·", Text(sentence, style="dim"))


def _largest(plan: Plan) -> str:
    """Return one line with the largest items of the memory."""
    entries = sorted(plan.best.memory.entries, key=lambda entry: -entry.bytes)
    words = [f"{entry.name} {short(entry.bytes, 'bytes')}" for entry in entries[:LARGEST_SHOWN]]
    if rest := sum(entry.bytes for entry in entries[LARGEST_SHOWN:]):
        words.append(f"the rest {short(rest, 'bytes')}")
    return f"Memory: {', '.join(words)}"


def _hidden_passes(plan: Plan) -> str:
    """Return one line on whether computation hides the hops of the ring, by pass."""
    passes = [it for it in plan.hidden if not it.name.endswith("recomputation")]
    names = {hides: [it.name for it in passes if it.hidden is hides] for hides in (True, False)}
    words = {True: "hidden behind computation in", False: "NOT hidden in"}
    said = [f"{words[hides]} {' and '.join(which)}" for hides, which in names.items() if which]
    return f"Hops of the ring: {'; '.join(said)}"


def _alike(plan: Plan) -> str:
    """Return a sentence on splits that take about as long as the plan's, and on what decides between them."""
    from ringlab.cost.planner.limits import ALIKE, split_words

    most = LARGEST_SHOWN - 1
    words = []
    for it in plan.alike[:most]:
        sharing = f" ({it.sharing})" if plan.serving and it.degrees.ring > 1 else ""
        words.append(f"{split_words(it)}{sharing} {short(it.memory.total_bytes, 'bytes')}")
    more = f", and {len(plan.alike) - most} more" if len(plan.alike) > most else ""
    heads = counted(plan.request.sized.main.dealt_heads, "K/V head")
    sharers = "tp shares" if plan.request.decoding else "tp and ulysses share"
    return (
        f"Other splits take at most {ALIKE:.1f} times as long, too little to rank them: {'; '.join(words)}{more}. "
        f"Memory decides, and the {heads} that {sharers}"
    )


def _left_out(plan: Plan) -> str:
    """Return a sentence about the tables that only --details shows."""
    parts = ["the memory item by item", f"the time of a {'token' if plan.request.decoding else 'layer'}"]
    if len(plan.suggestions) > CHANGES_SHOWN:
        parts.append(f"{len(plan.suggestions) - CHANGES_SHOWN} more changes")
    if plan.weighed > 1:
        parts.append(f"other ways ({plan.weighed} were compared)")
    return ", ".join([*parts, "what is assumed, and what the words mean"])


def _first_lines(plan: Plan) -> list[str]:
    from ringlab.cost.planner.step_time import StepTime

    best, request = plan.best, plan.request
    of_a = "token" if request.decoding else "step"
    rate = f"{_rate(best.tokens_per_s)} tokens/s, {_rate(best.tokens_per_s / request.gpus)} per {request.machine_word}"
    if isinstance(best.time, StepTime):
        rate += f"; {in_percent(best.utilisation)} of the peak, counting the model's own FLOPs"
    would = "" if plan.fits else " if it did fit"
    lines = [f"{of_a.capitalize()}: {duration(best.step_s)}{would} ({rate})"]
    lines += _serving(plan) if plan.serving is not None else []
    lines.append(_published(plan))
    if best.degrees.ring > 1 and not request.decoding:
        whole, _ = best.work()
        lines.append(
            f"Layout: {best.layout}, {plan.chunk_words}; the busiest rank computes {whole:.3f} × the mean"
        )
    heads = request.sized.main.dealt_heads
    copies = best.degrees.kv_copies(heads)
    if copies > 1:
        lines.append(f"K/V heads: each on {copies} ranks, since tp × ulysses is more than {heads}")
    return [*lines, f"Limit: {plan.limit.kind}: {plan.limit.sentence}"]


def _serving(plan: Plan) -> list[str]:
    time, request, best = plan.serving, plan.request, plan.best
    assert time is not None, "asked for a plan that serves"
    each = f"{_rate(best.tokens_per_s / request.batch)} tokens/s for each of {counted(request.batch, 'sequence')}"
    if request.batch > 1:
        each = f"{_rate(best.tokens_per_s)} tokens/s, {each}"
    prompt, chunks = request.tokens - request.generated, len(time.chunks_s)
    fed = f"a prompt of {counted(prompt, 'token')} in {counted(chunks, 'chunk')} of {min(request.chunk, prompt):,}"
    lines = [f"Serving: {each}; first token after {duration(time.first_token_s)} ({fed})"]
    if time.prefill_groups is not None:
        pool = f"{best.degrees.tp * best.degrees.ring} {request.machine_word}s"
        lines.append(
            f"Answer: {counted(request.generated, 'token')} {duration(time.answer_s)} after the prompt, if it waits for nothing; "
            f"{time.prefill_groups:.2g} groups of {pool} for each replica feed prompts as fast as answers end"
        )
    return lines


def _published(plan: Plan) -> str:
    found = plan.published
    if found is None:
        return "No promise: no published run of this kind was found to hold plans to"
    # Rounded outwards, so that the range holds all runs.
    times = f"{math.floor(10 * found.least) / 10} to {math.ceil(10 * found.most) / 10} times"
    return f"No promise: {found.runs} published runs took {times} as long as their plans (docs/benchmarks.md)"


def _rate(n: float) -> str:
    return f"{n:,.0f}" if n >= 100 else f"{n:.3g}"


def _memory(plan: Plan) -> Table:
    best, usable = plan.best, plan.request.usable_bytes
    table = _table(f"Memory of one {plan.request.machine_word}", "", ">GB", ">of usable", "what")
    for entry in best.memory.entries:
        share = entry.bytes / usable
        table.add_row(entry.name, _gb(entry.bytes), in_percent(share), entry.note)
    total, rest = best.memory.total_bytes, usable - best.memory.total_bytes
    table.add_section()
    left = f"{short(abs(rest), 'bytes')} {'left' if rest >= 0 else 'too much'}"
    style = "bold" if rest >= 0 else "bold red"
    table.add_row("in all", _gb(total), in_percent(total / usable), left, style=style)
    table.add_row(
        "usable", _gb(usable), "", f"{short(plan.request.machine.memory_bytes, 'bytes')} less the reserve"
    )
    return table


def _table(title: str, *headings: str) -> Table:
    """Return an empty table without a frame. Numbers are below a heading that begins with ">", to the right."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f}" if n >= 0.5e7 else "<0.01"


ROWS: tuple[tuple[str, str], ...] = (
    ("the layer's matrices", "linear_s"),
    ("attention", "attention_s"),
    ("waiting: ring", "ring_exposed_s"),
    ("waiting: Ulysses all-to-all", "ulysses_s"),
    ("waiting: TP collectives", "tensor_s"),
    ("waiting: weights and gradients", "weights_exposed_s"),
    ("waiting: tokens to experts and back", "dispatch_s"),
    ("waiting: host", "host_exposed_s"),
)


BESIDE = (
    ("beside it: ring's hops", "ring_s"),
    ("beside it: weights", "weights_s"),
    ("beside it: activations to and from the host", "host_s"),
)


def _time(plan: Plan) -> Group | Table:
    from ringlab.cost.planner.step_time import StepTime

    time = plan.best.time
    return _layer(time) if isinstance(time, StepTime) else _token(time)


def _layer(time: StepTime) -> Group:
    passes = (each.name.replace("full recomputation", "recomputed") for each in time.passes)
    table = _table("Time of one layer", "", *(f">{name}" for name in passes))

    def rows(named: tuple[tuple[str, str], ...], style: str = "") -> None:
        for label, name in named:
            figures = [getattr(each, name) for each in time.passes]
            if any(figures):
                table.add_row(label, *map(_seconds, figures), style=style)

    rows(ROWS)
    table.add_section()
    rows((("in all", "total_s"),), "bold")
    rows(BESIDE, "dim")
    return Group(table, Text(" + ".join(_parts(time)) + f" = {duration(time.total_s)}"))


def _parts(time: StepTime) -> list[str]:
    """Return the parts of a step's time in words.

    For a pipeline, the parts begin with the time of all rounds in its slowest stage, which may be the stage
    that computes the logits.
    """
    rounds = f"{time.rounds} rounds × " if time.rounds > 1 else ""
    if time.pipeline is not None:
        parts = [f"{rounds}the slowest stage {duration(time.rounds * time.round_s)}"]
        parts.append(f"bubble {duration(time.bubble_s)}")
    else:
        layers = time.rounds * time.layers * sum(each.total_s for each in time.passes)
        parts = [f"{rounds}{time.layers} layers {duration(layers)}"]
        parts.append(f"logits {duration(time.rounds * time.vocabulary_s)}")
    return [*parts, f"update {duration(time.update_s)}"] if time.update_s else parts


def _token(time: DecodeTime) -> Table:
    table = _table("Time of one token", "", "seconds")
    rows = (
        ("the weights: reading, or computing", time.weights_s),
        ("reading the K/V cache", time.cache_s),
        ("waiting: TP all-reduces", time.tensor_s),
        ("waiting: merging partial results", time.merge_s),
    )
    for label, seconds in rows:
        table.add_row(label, _seconds(seconds))
    table.add_section()
    table.add_row("in all", _seconds(time.total_s), style="bold")
    return table


def _seconds(t: float) -> str:
    return short(t, "seconds") if t else "–"


def _hidden(plan: Plan) -> list[str]:
    lines = []
    for each in plan.hidden:
        if each.name.endswith("recomputation"):
            continue
        verdict = "hidden" if each.hidden else "NOT hidden"
        comparison = "≥" if each.hidden else "<"
        lines.append(
            f"Ring {each.name}: {verdict}, {each.tokens:,} tokens per rank {comparison} {each.least_tokens:,} that "
            f"{each.link} needs"
        )
    if any(each.name == "backward" and each.hidden for each in plan.hidden):
        lines[-1] += "; the last hop of dK and dV has nothing to hide behind"
    return lines if plan.ring_table is None else [*lines, _travel(plan.ring_table, plan.request.machine_word)]


def _travel(found: RingTable, machine_word: str) -> str:
    """Return one line with the schedule that sends least, and the one that waits least if it differs."""
    least, shortest, ring = found.least, found.shortest, found.ring
    words = f"Who travels: {least.schedule} sends least, {short(least.sent_bytes or 0, 'bytes')} a layer on each {machine_word}"
    if least is not ring:
        words += f" (the ring of this plan {short(ring.sent_bytes or 0, 'bytes')})"
    waits = f"waits least, {short(shortest.exposed_s or 0, 'seconds')}"
    waits += "" if shortest is ring else f" (the ring {short(ring.exposed_s or 0, 'seconds')})"
    if not ring.exposed_s:
        words += ", and none has to wait"
    else:
        words += f", and {waits}" if shortest is least else f"; {shortest.schedule} {waits}"
    if not found.latent_below:
        return words
    return f"{words}; a latent (MLA) would send less with fewer than {found.latent_below:,} numbers a token"


def _changes(plan: Plan, most: int) -> None:
    people.print(Text("\nWhat to change" if plan.fits else "\nThe nearest that fits", style="bold"))
    if not plan.suggestions:
        people.print("  nothing found: try other hardware, or a smaller model")
    for number, each in enumerate(plan.suggestions[:most], 1):
        _item(f"{number}.", Text(each.sentence))
        _item("", Text(each.request.command(), style="cyan"))


def _item(mark: str, text: Text) -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3)
    grid.add_column()
    grid.add_row(mark, text)
    people.print(Padding(grid, (0, 0, 0, 1)))


def _alternatives(plan: Plan) -> None:
    slower = [it for it in plan.alternatives if it not in plan.alike]
    others = (*plan.alike[:MOST_ALIKE], *slower, *plan.layouts)
    if not others:
        return
    people.print()
    how = ("shared by", "first token") if plan.serving else ("layout", "recomputed")
    of_a = "token" if plan.request.decoding else "step"
    table = _table(f"Other ways: {plan.weighed} were compared", "split", *how, ">GB", f">{of_a}")
    from ringlab.cost.planner.limits import ALIKE, split_words

    for each in (plan.best, *others):
        chosen = each is plan.best
        time = "≈ " if each in plan.alike else ""
        time += f"{duration(each.step_s)}" + ("" if each.fits else " (does not fit)")
        cells = (split_words(each), *_how(each), _gb(each.memory.total_bytes), time)
        table.add_row(*cells, style="bold" if chosen else "")
    people.print(table)
    if plan.alike:
        people.print(
            f"≈: at most {ALIKE:.1f} times as long as the plan, too little to rank the splits, which stand in the order of "
            "their memory.",
            style="dim",
        )


def _how(candidate: Candidate) -> tuple[str, str]:
    """Return two columns: sharing and the time of the first token for serving, else layout and recomputation."""
    from ringlab.cost.planner.serve_time import serving_time

    ring = candidate.degrees.ring > 1
    if candidate.request.purpose == "serve":
        first = serving_time(candidate.serving).first_token_s
        return candidate.sharing if ring else "–", duration(first)
    return candidate.layout if ring and not candidate.request.decoding else "–", candidate.recomputation


@dataclass(frozen=True)
class BoundOptions:
    """The options of the command line that bounds read."""

    model: str | None
    tokens: int | None
    hardware: str | None
    ranks: int | None
    attention_weight: float
    tile: tuple[int, int] | None
    link: str
    bandwidth: str | None
    dtype: str

    def need(self, *names: str) -> tuple[Any, ...]:
        """Return the options with these names. Raises: BadParameter for an option that was left out."""
        for name in names:
            if getattr(self, name) is None:
                raise typer.BadParameter("is missing for this bound", param_hint=f"--{name}")
        return tuple(getattr(self, name) for name in names)


def show_bound(name: str, given: BoundOptions, as_json: bool) -> None:
    """Print a bound. Raises: CostError for an unknown name, or options that the paper does not cover."""
    bounds = {"striped": striped_bound, "ring": ring_bound, "context": context_bound}
    if name not in bounds:
        raise CostError(f"one of the bounds {', '.join(bounds)}", repr(name), nearest(name, bounds))
    figures, sentence = bounds[name](given)
    if as_json:
        print_json({"ok": True, "bound": name, **figures})
    else:
        people.print(sentence, highlight=False)
        people.print(f"Source: {figures['source']}", style="dim", highlight=False)
        if "note" in figures:
            people.print(f"Note: {figures['note']}", style="dim", highlight=False)


def striped_bound(given: BoundOptions) -> tuple[dict[str, Any], str]:
    """Return the largest speed-up of the striped over the contiguous layout, as numbers and as a sentence.

    Raises: CostError for an unknown model, or ranks or tokens out of range.
    """
    from ringlab.cost import papers
    from ringlab.cost.models import model
    from ringlab.cost.planner.parallelism import MOST_IN_A_RING
    from ringlab.cost.planner.request import MOST_TOKENS, check_count

    name, ranks, tokens = given.need("model", "ranks", "tokens")
    # The table of work by (rank, step) has a row and a column for each rank.
    check_count("ranks", ranks, MOST_IN_A_RING)
    check_count("tokens", tokens, MOST_TOKENS)
    speedup = papers.striped_speedup(model(name), ranks, tokens, given.attention_weight, given.tile)
    figures = {
        "max_speedup": speedup,
        "model": name,
        "ranks": ranks,
        "tokens": tokens,
        "attention_weight": given.attention_weight,
        "tile": list(given.tile) if given.tile else None,
        "source": "arXiv 2311.09431, section 4",
    }
    tiles = f", tiles of {given.tile[0]} × {given.tile[1]}" if given.tile else ""
    return figures, (
        f"Striped is at most {speedup:.2f} times as fast as contiguous: {name}, {tokens:,} tokens on {ranks} ranks, "
        f"attention's FLOPs weighted {given.attention_weight:g}{tiles}"
    )


def ring_bound(given: BoundOptions) -> tuple[dict[str, Any], str]:
    """Return the shortest block and sequence that hide communication, as numbers and as a sentence.

    Raises: CostError for unknown hardware, link or dtype, or a bandwidth without a unit.
    """
    from ringlab.cost import papers
    from ringlab.cost.hardware import Link, hardware

    (name,) = given.need("hardware")
    machine = hardware(name)
    links: dict[str, Link] = {"inside": machine.inside, "between": machine.between}
    if given.link not in links:
        raise CostError("a link: inside or between", repr(given.link), nearest(given.link, links))
    link, peak = links[given.link], machine.peak(given.dtype)
    if given.bandwidth is not None:
        link = Link("a link", quantity(given.bandwidth, "bytes/s"), 0.0, "as given")
    block, sequence = papers.ring_minimum(peak, link.bytes_per_s)
    figures = {
        "min_block_tokens": block,
        "min_sequence_tokens": sequence,
        "hardware": name,
        "link": link.name,
        "bytes_per_s": link.bytes_per_s,
        "flops_per_s": peak,
        "source": "formula of arXiv 2310.01889, table 2 (c = F/B, 6·c); " + _rates(given, machine, link),
        "note": "the paper's own figures: --bandwidth with the bandwidth that its table 2 gives, on hardware of its peak",
    }
    return figures, (
        f"A hop over {link.name} ({short(link.bytes_per_s, 'bytes/s')} one way) hides behind a block of {block:,.0f} "
        f"tokens or more; with {papers.SEQUENCE_BLOCKS} blocks on a rank, {sequence:,.0f} tokens "
        f"({machine.title}, {short(peak, 'FLOP/s')}, unmasked, as many K/V heads as query heads)"
    )


def _rates(given: BoundOptions, machine: Hardware, link: Link) -> str:
    """Return the sources of the FLOP/s and bytes/s in a ring's bound, which do not come from the paper."""
    table = f"FLOP/s of {machine.name} from this project's table ({machine.source})"
    if given.bandwidth is not None:
        return f"{table}, bandwidth as given"
    return f"{table}, bandwidth too ({link.source})"


def context_bound(given: BoundOptions) -> tuple[dict[str, Any], str]:
    """Return the longest contexts in the Ring Attention paper's setting, as numbers and as a sentence.

    Raises: CostError for an unknown model or hardware, or ranks out of range.
    """
    from ringlab.cost import papers
    from ringlab.cost.hardware import hardware
    from ringlab.cost.models import model
    from ringlab.cost.planner.request import check_count

    name, machine_name, ranks = given.need("model", "hardware", "ranks")
    check_count("ranks", ranks)
    machine, sizes = hardware(machine_name), model(name)
    longest = {
        kind: papers.ring_max_context(sizes, ranks, machine.memory_bytes, kind)
        for kind in papers.ARCHITECTURES
    }
    figures = {
        "max_context_tokens": longest,
        "model": name,
        "hardware": machine_name,
        "ranks": ranks,
        "source": "arXiv 2310.01889, table 3, in its setting: float32, Adam, FSDP over all ranks",
    }
    words = ", ".join(f"{kind} {tokens:,}" for kind, tokens in longest.items())
    return figures, f"Longest context of {sizes.title} on {ranks:,} × {machine.title}, tokens: {words}"


def show_tables(as_json: bool) -> None:
    """Print the models and the hardware that plans can use, each with its source."""
    from ringlab.cost.hardware import hardware, hardware_names
    from ringlab.cost.models import model, model_names

    models, machines = [model(name) for name in model_names()], [hardware(name) for name in hardware_names()]
    if as_json:
        print_json({"ok": True, **_tables(models, machines)})
        return
    rows = []
    for it in models:
        heads = ", ".join(dict.fromkeys(f"{kind.H}/{kind.K} heads of {kind.D}" for kind in it.kinds))
        active = f" ({it.active_parameters / 1e9:.3g} for each token)" if it.expert_parameters else ""
        what = f"{it.title}: {it.parameters / 1e9:.3g} billion{active}, {it.layers} layers, {heads}"
        rows.append((it.name, what, it.source))
    _print_sources("models", "model", rows)
    rows = []
    for each in machines:
        rate = ", ".join(f"{dtype} {short(flops, 'FLOP/s')}" for dtype, flops in each.flops_per_s.items())
        links = "; ".join(
            f"{where} {link.name} {short(link.bytes_per_s, 'bytes/s')}"
            for where, link in (("inside", each.inside), ("between", each.between))
        )
        what = f"{each.title}: {each.ranks_per_node} per node, {short(each.memory_bytes, 'bytes')}; {rate}; {links}"
        rows.append((each.name, what, "; ".join((each.source, each.inside.source, each.between.source))))
    _print_sources("hardware", "hardware", rows)
    people.print("Bandwidths count one direction, per rank. Your own: a TOML file in place of the name.")


def _print_sources(title: str, heading: str, rows: list[tuple[str, str, str]]) -> None:
    table = Table(heading, "", "source", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    people.print(table)


def _tables(models: list[Any], machines: list[Any]) -> dict[str, Any]:
    of_model = ("name", "title", "parameters", "active_parameters", "source")
    of_machine = ("name", "title", "ranks_per_node", "memory_bytes", "flops_per_s")
    return {
        "models": [{name: getattr(it, name) for name in of_model} for it in models],
        "hardware": [
            {name: getattr(it, name) for name in of_machine}
            | {
                "inside_bytes_per_s": it.inside.bytes_per_s,
                "between_bytes_per_s": it.between.bytes_per_s,
                "sources": [it.source, it.inside.source, it.between.source, it.reached.source],
            }
            for it in machines
        ],
    }
