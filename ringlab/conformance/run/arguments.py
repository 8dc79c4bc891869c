"""The values of the arguments that change attention, by every parameter name that code uses for them.

If a target has a parameter with one of these names, it gets the value that the run requires. Tensors over
tokens have this rank's tokens. Lengths and their cumulative sums are those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from numpy import arange, ndarray
from torch import Tensor

from ringlab.conformance.run.run import Run, joint_of, sinks_of, slopes_of
from ringlab.conformance.target.argument_names import (
    ALIBI,
    CU_PADDED,
    CU_SEQLENS,
    DROPOUTS,
    GRADIENTS_OF,
    IDS,
    JOINT_KEYS,
    JOINT_VALUES,
    MAX_SEQLENS,
    PACKING,
    PADDING,
    PLAIN,
    PREFIXES,
    SEEDS,
    SINKS,
    SOFTCAPS,
    VALID,
)
from ringlab.conformance.target.calling import as_axes
from ringlab.conformance.target.claims import Claims, Target


def given(
    target: Target | Claims, run: Run, own: Int[ndarray, " L"], device: str | torch.device
) -> Mapping[str, Any]:
    """Return the arguments that a plain run does not pass, for the rank that owns the tokens `own`."""
    found = window_and_softcap(run)
    found |= dict.fromkeys(PREFIXES, run.prefix) if run.prefix else {}
    found |= dict.fromkeys(SINKS, sinks_of(run).to(device)) if run.sinks else {}
    found |= dict.fromkeys(ALIBI, slopes_of(run).to(device)) if run.alibi else {}
    found |= _joint(target, run, device) if run.joint else {}
    found |= (
        dict.fromkeys(DROPOUTS, run.dropout) | dict.fromkeys(SEEDS, run.dropout_seed) if run.dropout else {}
    )
    found |= _padding(run, own, device) if run.pads else {}
    found |= {
        name: value
        for name, value in _packing(run, own, device).items()
        if run.documents or name in target.required
    }
    if target.takes_mask and (not run.mask.plain or "mask" in target.required):
        found |= {"mask": run.mask}
    return found


def window_and_softcap(run: Run) -> dict[str, Any]:
    """Return the window and the soft cap of a run, under all their parameter names."""
    found: dict[str, Any] = dict.fromkeys(SOFTCAPS, run.softcap) if run.softcap else {}
    if run.window:
        found |= {"window": run.window, "sliding_window": run.window}
        found |= {"window_size": (run.window - 1, 0 if run.causal else run.window - 1)}
        found |= {"window_left": run.window - 1} if run.causal else {}
    return found


def names_given(claims: Claims, run: Run) -> set[str]:
    """Return the parameter names to which a call of this run gives a value, if the target has them."""
    always = {*PLAIN - {*PACKING, "scale", "softmax_scale"}, *(() if claims.autograd else GRADIENTS_OF)}
    scale = {"scale", "softmax_scale"} if run.scale is not None else set()
    return {*always, *scale, *given(claims, run, arange(run.S), "cpu")}


def _joint(target: Target | Claims, run: Run, device: str | torch.device) -> dict[str, Any]:
    k, v = (as_axes(x, target.axes).to(device) for x in joint_of(run))
    return {**dict.fromkeys(JOINT_KEYS, k), **dict.fromkeys(JOINT_VALUES, v), "joint_strategy": run.joint}


def _padding(run: Run, own: Int[ndarray, " L"], device: str | torch.device) -> dict[str, Any]:
    """Return masks of this rank's padding tokens, by parameter name."""
    padding = torch.from_numpy(run.padding[own]).expand(run.B, -1).to(device)
    return {**dict.fromkeys(PADDING, padding), **dict.fromkeys(VALID, (~padding).long())}


def _packing(run: Run, own: Int[ndarray, " L"], device: str | torch.device) -> dict[str, Any]:
    """Return the arguments for packed documents, by parameter name.

    They are the documents' ends in the whole sequence, and the ids and positions of this rank's tokens.
    """
    documents = run.documents or (run.S,)
    ids = torch.from_numpy(run.mask.document_of(own))
    ends = _ends(documents).to(device)
    return {
        **dict.fromkeys(CU_SEQLENS, ends),
        **dict.fromkeys(MAX_SEQLENS, max(documents)),
        **dict.fromkeys(CU_PADDED, _ends(run.with_padding or (run.S,)).to(device)),
        **dict.fromkeys(IDS, ids.to(device)),
        "position_ids": torch.from_numpy(run.mask.position_ids(own)).to(device),
    }


def _ends(lengths: tuple[int, ...]) -> Int[Tensor, " ends"]:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
