"""`ringlab plan --bound …` and `--list`: bounds stated by papers, and the tables that plans use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer
from rich.table import Table

from ringlab.cli.output import people, print_json
from ringlab.cost.hardware import Hardware, Link, hardware, hardware_names
from ringlab.cost.models import model, model_names
from ringlab.cost.planner.parallelism import MOST_IN_A_RING
from ringlab.cost.planner.request import MOST_TOKENS, check_count
from ringlab.cost.units import nearest, quantity, short
from ringlab.errors import CostError

NAMES = ("striped", "ring", "context")


@dataclass(frozen=True)
class Given:
    """The options that bounds read."""

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
        """Return these options. Raises: BadParameter for one that was left out."""
        for name in names:
            if getattr(self, name) is None:
                raise typer.BadParameter("is missing for this bound", param_hint=f"--{name}")
        return tuple(getattr(self, name) for name in names)


def show_bound(name: str, given: Given, as_json: bool) -> None:
    """Print a bound. Raises: CostError for an unknown name, or options that the paper does not cover."""
    bounds = {"striped": striped_bound, "ring": ring_bound, "context": context_bound}
    if name not in bounds:
        raise CostError(f"a bound among {', '.join(NAMES)}", repr(name), nearest(name, NAMES))
    figures, sentence = bounds[name](given)
    if as_json:
        print_json({"ok": True, "bound": name, **figures})
    else:
        people.print(sentence, highlight=False)
        people.print(f"Source: {figures['source']}", style="dim", highlight=False)
        if "note" in figures:
            people.print(f"Note: {figures['note']}", style="dim", highlight=False)


def striped_bound(given: Given) -> tuple[dict[str, Any], str]:
    """Return the striped layout's greatest speed-up over contiguous, as figures and as a sentence.

    Raises: CostError for an unknown model, or ranks or tokens out of range.
    """
    from ringlab.cost import papers

    name, ranks, tokens = given.need("model", "ranks", "tokens")
    check_count(
        "ranks", ranks, MOST_IN_A_RING
    )  # the table of work by (rank, step) has as many rows and columns
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


def ring_bound(given: Given) -> tuple[dict[str, Any], str]:
    """Return the shortest block and sequence that hide communication on some hardware, as figures and a sentence.

    Raises: CostError for unknown hardware, link or dtype, or a bandwidth without a unit.
    """
    from ringlab.cost import papers

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


def _rates(given: Given, machine: Hardware, link: Link) -> str:
    """The sources of the FLOP/s and bytes/s in a ring's bound, which are not the paper's."""
    table = f"FLOP/s of {machine.name} from this project's table ({machine.source})"
    if given.bandwidth is not None:
        return f"{table}, bandwidth as given"
    return f"{table}, bandwidth too ({link.source})"


def context_bound(given: Given) -> tuple[dict[str, Any], str]:
    """Return the longest contexts in the Ring Attention paper's setting by architecture, as figures and a sentence.

    Raises: CostError for an unknown model or hardware, or ranks out of range.
    """
    from ringlab.cost import papers

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
    models, machines = [model(name) for name in model_names()], [hardware(name) for name in hardware_names()]
    if as_json:
        print_json({"ok": True, **_tables(models, machines)})
        return
    shown = Table("model", "", "source", title="models", title_justify="left")
    for it in models:
        what = f"{it.title}: {it.parameters / 1e9:.3g} billion, {it.layers} layers, {it.H}/{it.K} heads of {it.D}"
        shown.add_row(it.name, what, it.source)
    people.print(shown)
    shown = Table("hardware", "", "source", title="hardware", title_justify="left")
    for each in machines:
        rate = ", ".join(f"{dtype} {short(flops, 'FLOP/s')}" for dtype, flops in each.flops_per_s.items())
        links = "; ".join(
            f"{where} {link.name} {short(link.bytes_per_s, 'bytes/s')}"
            for where, link in (("inside", each.inside), ("between", each.between))
        )
        what = f"{each.title}: {each.ranks_per_node} per node, {short(each.memory_bytes, 'bytes')}; {rate}; {links}"
        shown.add_row(each.name, what, "; ".join((each.source, each.inside.source, each.between.source)))
    people.print(shown)
    people.print("Bandwidths count one direction, per rank. Your own: a TOML file in place of the name.")


def _tables(models: list[Any], machines: list[Any]) -> dict[str, Any]:
    return {
        "models": [
            {"name": it.name, "title": it.title, "parameters": it.parameters, "source": it.source}
            for it in models
        ],
        "hardware": [
            {
                "name": it.name,
                "title": it.title,
                "ranks_per_node": it.ranks_per_node,
                "memory_bytes": it.memory_bytes,
                "flops_per_s": dict(it.flops_per_s),
                "inside_bytes_per_s": it.inside.bytes_per_s,
                "between_bytes_per_s": it.between.bytes_per_s,
                "sources": [it.source, it.inside.source, it.between.source, it.reached.source],
            }
            for it in machines
        ],
    }
