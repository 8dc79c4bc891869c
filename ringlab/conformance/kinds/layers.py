"""Finds the layer that differs first between a training step on P ranks and the same step on one process.

The step is a function as in `ringlab.conformance.kinds.step`: it gets the whole batch, makes its own model and
runs it. The model's modules need no change, because torch's global hooks see every call of every module.
There are three kinds of runs:

    truth   one process, all in float64, including weights, norms and losses whose code asks for float32
    plain   one process, in the model's own dtype, with the terms of products added up in two orders
    ranks   P ranks, in the model's own dtype

In a plain run and on ranks, each output of a module is recorded, and then replaced by the truth's values for
the same tokens, rounded to the output's dtype. So each module is compared alone. Errors do not add up from
layer to layer, a wrong module does not make later ones wrong, and no rounding sends a token to another
expert. Gradients pass through the replacement. They are not replaced, so an error of a gradient reaches all
gradients that are computed after it.

A rank's tokens are identified by the token ids in the inputs of its modules. For this purpose, no two
columns of the batch are equal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ringlab.conformance.kinds.calls import check_parameters
from ringlab.conformance.kinds.layer_comparison import Comparison, LayerReport
from ringlab.conformance.kinds.layer_runs import Runs
from ringlab.conformance.kinds.recording import Plan
from ringlab.conformance.kinds.step_cases import (
    GIVEN,
    LENGTH,
    PACKED,
    VOCABULARY,
    length,
)
from ringlab.conformance.run.loading import VIRTUAL, named, transport_of
from ringlab.conformance.run.torchrun.rendezvous import World
from ringlab.conformance.target.argument_names import AROUND
from ringlab.conformance.target.calling import name_of, parameters, required
from ringlab.conformance.target.claims import RING, TORCH
from ringlab.errors import BackendError, WorldSizeError
from ringlab.temporary import TemporaryFolder


def first_differences(
    target: Any,
    *,
    ranks: int = 2,
    transport: str = VIRTUAL,
    tokens: int = LENGTH,
    documents: Sequence[int] = (),
    layout: str = "",
    seed: int = 0,
    limit: float = 120.0,
    torchrun: World | None = None,
) -> LayerReport:
    """Return where `target`, a step or "package.module:name", first differs between P ranks and one process.

    transport: the transport for a step over ringlab's Comm; a step over torch.distributed runs in gloo
    processes. tokens: the length of the sequence, which is rounded up until every layout can divide it.
    documents: lengths of packed documents, which replace `tokens`; with more than VOCABULARY tokens in all,
    there are as many token ids as tokens. layout: the name of the step's layout, if no module takes token ids.
    limit: seconds for each run on processes. torchrun: the place of this process among those that torchrun
    started, which are the ranks; each of them calls this function and gets the report.

    Raises: BackendError for a step that cannot be called, fails on one process, is random, or passes no
    token ids to a module; WorldSizeError for fewer than 2 ranks; TransportTimeout if torchrun's processes do
    not connect.

    >>> from ringlab.conformance.kinds.layers import first_differences
    >>> from ringlab.plain_step import step
    >>> first_differences(step, ranks=2).ok
    True
    """
    ranks = torchrun.size if torchrun else ranks
    if ranks < 2:
        raise WorldSizeError("at least 2 ranks, to compare with one process", str(ranks))
    function = named(target) if isinstance(target, str) else target
    check_parameters(function, {*GIVEN, *AROUND})
    over = RING if not {"ring", "comm"}.isdisjoint(parameters(function)) else TORCH
    transport = transport_of(over, transport)
    plan = _plan(ranks, tokens, documents, layout, seed, packs=not required(function).isdisjoint(PACKED))
    with TemporaryFolder(prefix="ringlab-diff-") as name, redirect_stdout(sys.stderr):
        runs = Runs(target, over == RING, transport, limit, Path(name))
        if torchrun:
            truth, plain, parts = runs.of_torchrun(plan, torchrun)
            transport = "torchrun"
        else:
            truth, plain = runs.alone(plan)
            parts = runs.on_ranks(plan)
    who = target if isinstance(target, str) else name_of(function)
    return Comparison(plan, truth, plain, parts).report(who, over, transport)


def _plan(P: int, tokens: int, documents: Sequence[int], layout: str, seed: int, packs: bool) -> Plan:
    """Return the plan. packs: whether the step requires packed documents.

    Raises: BackendError for invalid lengths.
    """
    if packs and not documents:
        documents = (VOCABULARY * 5 // 8, VOCABULARY * 3 // 8)
    S = sum(documents) if documents else length(P, tokens)
    if documents and (min(documents) < 1 or S > _MOST_PACKED):
        raise BackendError(
            f"documents of at least 1 token, and at most {_MOST_PACKED} tokens in all", f"{tuple(documents)}"
        )
    if not documents and not 0 < tokens <= S <= _MOST:
        raise BackendError(f"from 1 to {_MOST} tokens, rounded up to a multiple of {2 * P}", str(tokens))
    return Plan(P, S, tuple(documents), layout, seed)


_MOST, _MOST_PACKED = 16_384, 4_096
