"""`ringlab diff`: finds the first layer of a model that differs between P ranks and one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ringlab.cli.output import Json, finish, ignored, people, print_json, reporting_errors
from ringlab.errors import BackendError

if TYPE_CHECKING:
    from ringlab.conformance.run.torchrun.rendezvous import World


def diff(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A training step, as ringlab check --kind step takes.")],
    ranks: Annotated[int, typer.Option(help="The number of ranks that are compared with one process.")] = 2,
    transport: Annotated[str, typer.Option(help="For steps over ringlab's Comm: virtual, or a transport between processes, such as gloo.")] = "virtual",
    tokens: Annotated[int, typer.Option(help="The length of a sequence, rounded up so that every layout divides it.")] = 48,
    documents: Annotated[str, typer.Option(help="Comma-separated lengths of packed documents, in place of --tokens. More than 32 tokens need a model with as many token ids.")] = "",
    layout: Annotated[str, typer.Option(help="The layout of the step, if no module takes token ids.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds for each run on processes.")] = 120.0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Name the first layer of a model that differs between P ranks and one process: module, rank, token.

    It compares weights first, then the outputs of all modules, then their gradients, each with a float64 run
    on one process. Under torchrun, the processes of torchrun are the ranks.
    """
    from ringlab.conformance.kinds.layers import first_differences

    with reporting_errors(as_json, status=2):
        asked: dict[str, Any] = {"tokens": tokens, "layout": layout, "seed": seed, "limit": limit}
        asked["documents"] = _lengths(documents)
        torchrun = _torchrun(context)
        found = first_differences(target, ranks=ranks, transport=transport, torchrun=torchrun, **asked)
        first = torchrun is None or torchrun.rank == 0
    if first and as_json:
        print_json(found.as_dict())
    elif first:
        people.print(str(found), highlight=False)
    finish(found.ok or not first)  # torchrun ends rank 0, which prints, as soon as another rank fails


def _lengths(documents: str) -> tuple[int, ...]:
    lengths = documents.split(",") if documents else []
    if not all(each.isdigit() for each in lengths):
        _refuse("--documents 20,12", repr(documents))
    return tuple(map(int, lengths))


def _torchrun(context: typer.Context) -> World | None:
    from ringlab.conformance.run.torchrun.rendezvous import world

    place = world()
    if place is not None and (given := ignored(context, ("ranks",))):
        _refuse(f"torchrun without {given}", "both", "leave one of them out")
    return place


def _refuse(needed: str, got: str, remedy: str = "") -> NoReturn:
    raise BackendError(needed, got, remedy)
