"""A plan for people: the answer first, then memory, time, limits, suggestions and assumptions."""

from __future__ import annotations

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ringlab.cli.output import people
from ringlab.cost.planner import Plan
from ringlab.cost.planner.limits import split_words
from ringlab.cost.planner.ring_table import RingTable
from ringlab.cost.planner.search import Candidate
from ringlab.cost.planner.serve_time import DecodeTime, serving_time
from ringlab.cost.planner.step_time import StepTime
from ringlab.cost.units import counted, duration, in_percent, short

WORDS = (
    "ring: ranks that hand K/V from one to the next; ulysses: ranks that trade tokens for heads by all-to-all; cp: both",
    "tp: ranks that share heads and feed-forward; dp: replicas with sequences of their own; pp: stages of a pipeline",
    "fsdp: ranks that share one copy of weights, gradients and optimizer; recomputed: what the backward computes again",
)

SERVING_WORDS = (
    "tp: ranks that share heads; cp: ranks that share a sequence's tokens; dp: replicas with sequences of their own",
    "copies: every rank of a cp group has all weights of its tp part; dcp: tp × cp ranks share the weights, and queries are "
    "gathered (decode context parallelism); helix: they share them, and queries are computed where they are needed",
)


def show(plan: Plan) -> None:
    """Print the plan."""
    people.print(Text(plan.answer, style="bold green" if plan.fits else "bold red"))
    for line in _first_lines(plan):
        people.print(Text(line))
    people.print()
    people.print(_memory(plan))
    people.print()
    people.print(_layer(plan.best.time) if isinstance(plan.best.time, StepTime) else _token(plan.best.time))
    for line in _hidden(plan):
        people.print(Text(line))
    _changes(plan)
    _alternatives(plan)
    people.print(Text("\nAssumed", style="bold"))
    for sentence in plan.assumptions:
        _item("·", Text(sentence, style="dim"))
    people.print(Text("\nWords", style="bold"))
    for sentence in SERVING_WORDS if plan.serving else WORDS:
        _item("·", Text(sentence, style="dim"))


def _first_lines(plan: Plan) -> list[str]:
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
    copies = best.degrees.kv_copies(request.sized.K)
    if copies > 1:
        lines.append(f"K/V heads: each on {copies} ranks, since tp × ulysses is more than {request.sized.K}")
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
    times = f"{found.least:.1f} to {found.most:.1f} times"
    return f"No promise: {found.runs} published runs took {times} as long as their plans (docs/benchmarks.md)"


def _rate(n: float) -> str:
    return f"{n:,.0f}" if n >= 100 else f"{n:.3g}"


def _memory(plan: Plan) -> Table:
    best, usable = plan.best, plan.request.usable_bytes
    table = Table(
        title=f"Memory of one {plan.request.machine_word}",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        expand=False,
    )
    for heading, justify in (("", "left"), ("GB", "right"), ("of usable", "right"), ("what", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
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


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f}" if n >= 0.5e7 else "<0.01"


ROWS: tuple[tuple[str, str], ...] = (
    ("the layer's matrices", "linear_s"),
    ("attention", "attention_s"),
    ("waiting: ring", "ring_exposed_s"),
    ("waiting: Ulysses all-to-all", "ulysses_s"),
    ("waiting: TP collectives", "tensor_s"),
    ("waiting: weights and gradients", "weights_exposed_s"),
    ("waiting: host", "host_exposed_s"),
)


BESIDE = (
    ("beside it: ring's hops", "ring_s"),
    ("beside it: weights", "weights_s"),
    ("beside it: activations to and from the host", "host_s"),
)


def _layer(time: StepTime) -> Group:
    table = Table(title="Time of one layer", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for each in time.passes:
        table.add_column(each.name.replace("full recomputation", "recomputed"), justify="right")
    for label, name in ROWS:
        figures = [getattr(each, name) for each in time.passes]
        if any(figures):
            table.add_row(label, *(_seconds(figure) for figure in figures))
    table.add_section()
    table.add_row("in all", *(_seconds(each.total_s) for each in time.passes), style="bold")
    for label, name in BESIDE:
        figures = [getattr(each, name) for each in time.passes]
        if any(figures):
            table.add_row(label, *(_seconds(figure) for figure in figures), style="dim")
    return Group(table, Text(" + ".join(_parts(time)) + f" = {duration(time.total_s)}"))


def _parts(time: StepTime) -> list[str]:
    """The step in words; in a pipeline the rounds of its slowest stage, which may be the one with the logits."""
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
    table = Table(
        "", "seconds", title="Time of one token", title_justify="left", show_edge=False, pad_edge=False
    )
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
    """Who travels in one line: the schedule of the fewest bytes, and the one that waits least if it is another."""
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
    return f"{words}; a latent (MLA) would send less with fewer than {found.latent_below:,} numbers a token"


def _changes(plan: Plan) -> None:
    people.print(Text("\nWhat to change" if plan.fits else "\nThe nearest that fits", style="bold"))
    if not plan.suggestions:
        people.print("  nothing found: try other hardware, or a smaller model")
    for number, each in enumerate(plan.suggestions, 1):
        _item(f"{number}.", Text(each.sentence))
        _item("", Text(each.request.command(), style="cyan"))


def _item(mark: str, text: Text) -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3)
    grid.add_column()
    grid.add_row(mark, text)
    people.print(Padding(grid, (0, 0, 0, 1)))


def _alternatives(plan: Plan) -> None:
    others = (*plan.alternatives, *plan.layouts)
    if not others:
        return
    people.print()
    title = f"Also weighed: {plan.weighed} ways in all"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for heading, justify in (
        ("split", "left"),
        ("shared by" if plan.serving else "layout", "left"),
        ("first token" if plan.serving else "recomputed", "left"),
        ("GB", "right"),
        ("token" if plan.request.decoding else "step", "right"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for each in (plan.best, *others):
        chosen = each is plan.best
        time = f"{duration(each.step_s)}" + ("" if each.fits else " (does not fit)")
        cells = (split_words(each), *_how(each), _gb(each.memory.total_bytes), time)
        table.add_row(*cells, style="bold" if chosen else "")
    people.print(table)
    people.print(
        "Splits within a few percent of each other are equal as far as this model can tell.", style="dim"
    )


def _how(candidate: Candidate) -> tuple[str, str]:
    """The columns that depend on the purpose: sharing and first token, or layout and recomputation."""
    ring = candidate.degrees.ring > 1
    if candidate.request.purpose == "serve":
        first = serving_time(candidate.serving).first_token_s
        return candidate.sharing if ring else "–", duration(first)
    return candidate.layout if ring and not candidate.request.decoding else "–", candidate.recomputation
