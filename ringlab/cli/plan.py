"""`ringlab plan`: does a context fit on a cluster, how, how fast, what limits it, and what would help?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ringlab.cli.output import Json, finish, print_json, reporting_errors
from ringlab.errors import CostError

if TYPE_CHECKING:
    from ringlab.cost.planner import Request

ASKED, SPLIT, BOUNDS = (
    "What is asked",
    "How to share it out (left open: the fastest that fits)",
    "Bounds of papers",
)


Tokens = Annotated[
    str | None, typer.Option(help="Tokens of one sequence: 131072, 128Ki, 1M.", rich_help_panel=ASKED)
]
ModelName = Annotated[
    str | None, typer.Option(help="A model by name (--list), or a TOML file.", rich_help_panel=ASKED)
]
HardwareName = Annotated[
    str | None, typer.Option(help="Hardware by name (--list), or a TOML file.", rich_help_panel=ASKED)
]
Inference = Annotated[
    str | None,
    typer.Option(
        help="Plan inference instead of training: a prompt, a token, or both.",
        rich_help_panel=ASKED,
        metavar="prefill|decode|serve",
    ),
]
PerNode = Annotated[
    int | None, typer.Option(help="GPUs in a node, if not the hardware's own.", rich_help_panel=ASKED)
]
Generated = Annotated[
    str | None,
    typer.Option(
        help="To serve: how many of the tokens are generated; the others are the prompt.",
        rich_help_panel=ASKED,
    ),
]
Chunk = Annotated[
    str | None,
    typer.Option(
        help="To serve: tokens of a prompt that are fed at once; 8Ki by default.", rich_help_panel=ASKED
    ),
]
Sharing = Annotated[
    str | None,
    typer.Option(
        help="To serve: how ranks that share sequences have the weights.",
        rich_help_panel=SPLIT,
        metavar="copies|dcp|helix",
    ),
]
LogitsChunk = Annotated[
    str | None,
    typer.Option(
        help="Tokens whose logits are in memory at once; by default all of a rank's.",
        rich_help_panel=SPLIT,
    ),
]
Dp = Annotated[
    int | None, typer.Option(help="Replicas, each with sequences of its own.", rich_help_panel=SPLIT)
]
Fsdp = Annotated[
    int | None,
    typer.Option(help="Ranks that share one copy of weights and optimizer.", rich_help_panel=SPLIT),
]
Tp = Annotated[int | None, typer.Option(help="Tensor-parallel degree.", rich_help_panel=SPLIT)]
Cp = Annotated[
    int | None, typer.Option(help="Ranks that share one sequence: ring × ulysses.", rich_help_panel=SPLIT)
]
RingDegree = Annotated[int | None, typer.Option(help="Ranks of a ring.", rich_help_panel=SPLIT)]
Ulysses = Annotated[int | None, typer.Option(help="Ranks of a Ulysses group.", rich_help_panel=SPLIT)]
Recomputation = Annotated[
    str | None,
    typer.Option(
        help="The activations computed again in backward.",
        rich_help_panel=SPLIT,
        metavar="none|selective|full",
    ),
]
LayoutName = Annotated[
    str | None,
    typer.Option(
        help="The layout, such as zigzag; an unknown name lists all.",
        rich_help_panel=SPLIT,
        metavar="NAME",
    ),
]
Pp = Annotated[
    int, typer.Option(help="Stages of a pipeline, one micro-batch per sequence.", rich_help_panel=SPLIT)
]
Interleave = Annotated[
    int, typer.Option(help="Chunks of layers on each stage: a shorter bubble.", rich_help_panel=SPLIT)
]
Offload = Annotated[
    str,
    typer.Option(
        help="Keep activations in the host's memory.", rich_help_panel=SPLIT, metavar="none|activations"
    ),
]
Tile = Annotated[
    str | None,
    typer.Option(
        help="Rows and keys of a kernel tile; 128x128 by default.", rich_help_panel=SPLIT, metavar="128x128"
    ),
]
Bound = Annotated[
    str | None,
    typer.Option(
        help="Compute a paper's bound instead.", rich_help_panel=BOUNDS, metavar="striped|ring|context"
    ),
]
Ranks = Annotated[int | None, typer.Option(help="Ranks of the bound.", rich_help_panel=BOUNDS)]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        help='One way, instead of the link\'s: "12.5 GB/s".', rich_help_panel=BOUNDS, metavar="<rate>"
    ),
]
Weight = Annotated[
    float,
    typer.Option(help="Cost of a FLOP of attention relative to one of a matrix.", rich_help_panel=BOUNDS),
]
WhichLink = Annotated[
    str, typer.Option(help="The link of the bound: inside or between nodes.", rich_help_panel=BOUNDS)
]


def plan(
    model: ModelName = None,
    tokens: Tokens = None,
    hardware: HardwareName = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.", rich_help_panel=ASKED)] = 1,
    gpus_per_node: PerNode = None,
    batch: Annotated[int, typer.Option(help="Sequences in a step, on all GPUs.", rich_help_panel=ASKED)] = 1,
    inference: Inference = None,
    generated: Generated = None,
    chunk: Chunk = None,
    dtype: Annotated[
        str, typer.Option(help="Of weights and activations.", rich_help_panel=ASKED)
    ] = "bfloat16",
    causal: Annotated[bool, typer.Option(help="Mask the future.", rich_help_panel=ASKED)] = True,
    reserve: Annotated[
        float, typer.Option(help="Fraction of the memory to leave unused.", rich_help_panel=ASKED)
    ] = 0.06,
    dp: Dp = None,
    fsdp: Fsdp = None,
    tp: Tp = None,
    cp: Cp = None,
    ring: RingDegree = None,
    ulysses: Ulysses = None,
    sharing: Sharing = None,
    recomputation: Recomputation = None,
    layout: LayoutName = None,
    pp: Pp = 1,
    interleave: Interleave = 1,
    offload: Offload = "none",
    logits_chunk: LogitsChunk = None,
    tile: Tile = None,
    bound: Bound = None,
    ranks: Ranks = None,
    attention_weight: Weight = 1.0,
    link: WhichLink = "inside",
    bandwidth: Bandwidth = None,
    show: Annotated[
        bool, typer.Option("--list", help="List models and hardware with their sources.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Size a cluster: does this context fit, with which layout and split, how fast, what limits it, and what would help?

    ringlab plan --model llama3-70b --tokens 1M --hardware h100 --nodes 8 --logits-chunk 4Ki
    """
    from ringlab.cli import plan_bounds
    from ringlab.cost import units

    with reporting_errors(as_json):
        if show:
            return plan_bounds.show_tables(as_json)
        edges = kernel_tile(tile)
        length = units.tokens(tokens) if tokens is not None else None
        if bound is not None:
            given = plan_bounds.Given(
                model, length, hardware, ranks, attention_weight, edges, link, bandwidth, dtype
            )
            return plan_bounds.show_bound(bound, given, as_json)
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
            logits_chunk=units.tokens(logits_chunk) if logits_chunk is not None else None,
            reserve=reserve,
            pp=pp,
            interleave=interleave,
            offload=offload,
            generated=units.tokens(generated) if generated is not None else 0,
            chunk=units.tokens(chunk) if chunk is not None else CHUNK,
            sharing=sharing,
        )
        _show(request, as_json)


def _show(request: Request, as_json: bool) -> None:
    from ringlab.cost.planner import plan as plan_of

    found = plan_of(request)
    if as_json:
        print_json(found.as_dict())
    else:
        from ringlab.cli.plan_output import show

        show(found)
    finish(found.fits)


def _need(**given: str | None) -> None:
    for name, value in given.items():
        if value is None:
            raise typer.BadParameter("is missing; --list shows models and hardware", param_hint=f"--{name}")


def kernel_tile(text: str | None) -> tuple[int, int] | None:
    """Return (rows, keys) of a kernel tile, None without a text. Raises: CostError for any other text."""
    if text is None:
        return None
    from ringlab.cost.planner.request import MOST_OF_A_COUNT
    from ringlab.cost.units import shown

    rows, _, keys = text.partition("x")
    read = [int(edge) if edge.isdecimal() and len(edge) < 10 else 0 for edge in (rows, keys)]
    if not all(1 <= edge <= MOST_OF_A_COUNT for edge in read):
        needed = f"a tile of rows x keys, both from 1 to {MOST_OF_A_COUNT:,}"
        raise CostError(needed, shown(text), "--tile 128x128")
    return read[0], read[1]
