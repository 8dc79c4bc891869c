"""Arguments that change attention, under every name that the field has for them.

A target is given what its run asks for, if it has a parameter of one of these names. Tensors of tokens are this rank's;
lengths and their sums are of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from numpy import arange, ndarray
from torch import Tensor

from ringlab.conformance.runs import Run, joint_of, sinks_of, slopes_of
from ringlab.conformance.target import (
    CU_PADDED,
    CU_SEQLENS,
    GRADIENTS_OF,
    IDS,
    MAX_SEQLENS,
    PACKING,
    PLAIN,
    Claims,
    Target,
    as_axes,
)

WINDOWS = ("window", "sliding_window", "window_left", "window_size")
"""`window` counts the row's own key, `window_left` the keys before it, and `window_size` is (left, right)."""
SOFTCAPS = ("softcap", "soft_cap", "logits_soft_cap", "logit_cap", "attn_logit_softcapping")
PREFIXES = ("prefix", "prefix_len", "prefix_length")
"""Keys at the start of the sequence that every row sees, in spite of a causal mask."""
SINKS = ("sinks", "sink", "s_aux", "attention_sinks", "learnable_sink")
"""A logit of each query head, (H,), in the dtype of q."""
DOCUMENTS = (*CU_SEQLENS, *IDS)
PADDING = ("key_padding_mask", "padding_mask")
"""(B, L), True for padding; `attention_mask` is 1 for the others."""
VALID = ("attention_mask",)
ALIBI = ("alibi_slopes",)
"""A slope of each query head, (H,), float32: a score falls by the slope for each token between its query and its key."""
JOINT_KEYS = ("joint_tensor_key", "joint_key", "joint_k")
JOINT_VALUES = ("joint_tensor_value", "joint_value", "joint_v")
"""Keys and values of tokens that every rank holds, to be counted once; `joint_strategy` is "front" or "rear"."""
DROPOUTS = ("dropout", "dropout_p")
SEEDS = ("seed", "dropout_seed")


def given(
    target: Target | Claims, run: Run, own: Int[ndarray, " L"], device: str | torch.device
) -> Mapping[str, Any]:
    """Return the arguments that this run has and a plain one does not, for the rank that owns the tokens `own`."""
    found: dict[str, Any] = {}
    if run.window:
        found |= {"window": run.window, "sliding_window": run.window}
        found |= {"window_size": (run.window - 1, 0 if run.causal else run.window - 1)}
        found |= {"window_left": run.window - 1} if run.causal else {}
    found |= dict.fromkeys(SOFTCAPS, run.softcap) if run.softcap else {}
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


def names_given(claims: Claims, run: Run) -> set[str]:
    """Return the names of the parameters to which the call of such a run gives a value, if a target has them."""
    always = {*PLAIN - {*PACKING, "scale", "softmax_scale"}, *(() if claims.autograd else GRADIENTS_OF)}
    scale = {"scale", "softmax_scale"} if run.scale is not None else set()
    return {*always, *scale, *given(claims, run, arange(run.S), "cpu")}


def _joint(target: Target | Claims, run: Run, device: str | torch.device) -> dict[str, Any]:
    k, v = (as_axes(x, target.axes).to(device) for x in joint_of(run))
    return {**dict.fromkeys(JOINT_KEYS, k), **dict.fromkeys(JOINT_VALUES, v), "joint_strategy": run.joint}


def _padding(run: Run, own: Int[ndarray, " L"], device: str | torch.device) -> dict[str, Any]:
    """Which of this rank's tokens are padding."""
    padding = torch.from_numpy(run.padding[own]).expand(run.B, -1).to(device)
    return {**dict.fromkeys(PADDING, padding), **dict.fromkeys(VALID, (~padding).long())}


def _packing(run: Run, own: Int[ndarray, " L"], device: str | torch.device) -> dict[str, Any]:
    """The documents: their ends in the whole sequence; ids, and places in documents, of this rank's tokens."""
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
