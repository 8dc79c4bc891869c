"""The values of the arguments that change attention, by every parameter name that code uses for them.

If a target has a parameter with one of these names, it gets the value that the run requires. Tensors over
tokens have this rank's tokens. Lengths and their cumulative sums are those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy import arange, ndarray
from torch import Tensor

from ringlab.conformance.run.run import NUMBERED, Run, bias_of, joint_of, sinks_of, slopes_of
from ringlab.conformance.target.argument_names import (
    ALIBI,
    BIASES,
    CU_PADDED,
    CU_SEQLENS,
    DROPOUTS,
    FLEX_MASKS,
    FLEX_SCORES,
    GRADIENTS_OF,
    IDS,
    JOINT_KEYS,
    JOINT_VALUES,
    MAX_SEQLENS,
    NEUTRAL,
    OF_KEYS,
    PACKING,
    PADDING,
    PLAIN,
    PREFIXES,
    SEEDS,
    SIDES,
    SINKS,
    SOFTCAPS,
    VALID,
)
from ringlab.conformance.target.calling import as_axes
from ringlab.conformance.target.claims import BOTTOM_RIGHT, Claims, Target
from ringlab.mask import Mask


def given(
    target: Target | Claims, run: Run, own: Int[ndarray, " L"], device: str | torch.device
) -> Mapping[str, Any]:
    """Return the arguments that a plain run does not pass, for the rank that owns the tokens `own`."""
    found = window_and_softcap(run)
    found |= dict.fromkeys(PREFIXES, run.prefix) if run.prefix else {}
    found |= dict.fromkeys(SINKS, sinks_of(run).to(device)) if run.sinks else {}
    found |= dict.fromkeys(ALIBI, slopes_of(run).to(device)) if run.alibi else {}
    found |= _bias(target, run, own, device) if run.bias else {}
    found |= _joint(target, run, device) if run.joint else {}
    found |= (
        dict.fromkeys(DROPOUTS, run.dropout) | dict.fromkeys(SEEDS, run.dropout_seed) if run.dropout else {}
    )
    found |= _padding(run, own, device) if run.any_padding else {}
    found |= {run.neutral: NEUTRAL[run.neutral]} if run.neutral else {}
    found |= {
        name: value
        for name, value in _packing(run, own, device).items()
        if run.documents or run.documents_of or name in target.required
    }
    if target.takes_mask and (not run.mask.plain or "mask" in target.required):
        found |= {"mask": run.mask}
    return found | (_mods(target, run, device) if {*FLEX_MASKS, *FLEX_SCORES} & {*target.takes} else {})


def window_and_softcap(run: Run) -> dict[str, Any]:
    """Return the window and the soft cap of a run, under all their parameter names."""
    found: dict[str, Any] = dict.fromkeys(SOFTCAPS, run.softcap) if run.softcap else {}
    if run.window:
        found |= {"window": run.window, "sliding_window": run.window}
        found |= {"window_size": (run.window - 1, 0 if run.causal else run.window - 1)}
        found |= {"window_left": run.window - 1} if run.causal else {}
    return found | (dict.fromkeys(SIDES, run.sides) if run.sides else {})


def names_given(claims: Claims, run: Run) -> set[str]:
    """Return the parameter names to which a call of this run gives a value, if the target has them."""
    always = {*PLAIN - {*PACKING, "scale", "softmax_scale"}, *(() if claims.autograd else GRADIENTS_OF)}
    scale = {"scale", "softmax_scale"} if run.scale is not None else set()
    return {*always, *scale, *given(claims, run, arange(run.S), "cpu")}


def _joint(target: Target | Claims, run: Run, device: str | torch.device) -> dict[str, Any]:
    k, v = (as_axes(x, target.axes).to(device) for x in joint_of(run))
    return {**dict.fromkeys(JOINT_KEYS, k), **dict.fromkeys(JOINT_VALUES, v), "joint_strategy": run.joint}


def _bias(
    target: Target | Claims, run: Run, own: Int[ndarray, " L"], device: str | torch.device
) -> dict[str, Any]:
    return dict.fromkeys(BIASES, bias_of(run)[:, :, own].to(device))


def _mods(target: Target | Claims, run: Run, device: str | torch.device) -> dict[str, Any]:
    """Return FlexAttention's functions for those arguments of a run for which the target has no other parameter."""
    takes, needed = {*target.takes}, target.required
    masked = not run.mask.plain or (run.causal and not {"causal", "is_causal"} & takes)
    mask, found = _mask_mod(run, device), dict[str, Any]()
    if "mask_mod" in takes and (masked or "mask_mod" in needed):
        found["mask_mod"] = mask
    if "block_mask" in takes and (masked or "block_mask" in needed):
        from torch.nn.attention.flex_attention import create_block_mask  # its import takes long

        found["block_mask"] = create_block_mask(
            mask, None, None, run.S, run.keys or run.S, device=str(device)
        )
    cap = 0.0 if takes & {*SOFTCAPS} else run.softcap
    alibi = 0.0 if takes & {*ALIBI} else run.alibi
    hides = masked and not found and not target.takes_mask
    if takes & {*FLEX_SCORES} and (cap or alibi or hides or needed & {*FLEX_SCORES}):
        slopes = slopes_of(run).to(device) if alibi else None
        found |= dict.fromkeys(FLEX_SCORES, _score_mod(cap, slopes, mask if hides else None))
    return found


def _mask_mod(run: Run, device: str | torch.device) -> Callable[..., Tensor]:
    """Return the function (batch, head, row, key) that says whether a row sees a key of the whole sequence."""
    mask = run.mask
    starts = torch.from_numpy(mask.bounds[:-1] if mask.documents else mask.bounds).to(device)
    prefixes = torch.tensor(mask.prefix, device=device).expand(len(starts))
    later = (run.keys - run.S) * (run.alignment == BOTTOM_RIGHT)

    def document(at: Tensor) -> Tensor:
        return (at.unsqueeze(-1) >= starts).sum(-1) - 1

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        found = row + later >= key if mask.causal else row == row
        found = found if mask.window is None else found & ((row - key).abs() < mask.window)
        found = found | (key - starts[document(key)] < prefixes[document(key)]) if mask.prefix else found
        return found & (document(row) == document(key)) if mask.documents else found

    # FlexAttention counts the parameters in a function's code, and a decorator that checks annotations hides them.
    return lambda batch, head, row, key: seen(batch, head, row, key)


def _score_mod(
    cap: float, slopes: Tensor | None, mask: Callable[..., Tensor] | None
) -> Callable[..., Tensor]:
    """Return the function (score, batch, head, row, key) that caps a score, adds ALiBi's bias, or hides the key."""

    def changed(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        score = cap * torch.tanh(score / cap) if cap else score
        score = score if slopes is None else score - slopes[head] * (key - row).abs()
        return score if mask is None else torch.where(mask(batch, head, row, key), score, -torch.inf)

    return lambda score, batch, head, row, key: changed(score, batch, head, row, key)


def _padding(run: Run, own: Int[ndarray, " L"], device: str | torch.device) -> dict[str, Any]:
    """Return masks of this rank's padding tokens, by parameter name."""
    padding = torch.from_numpy(run.padded_tokens[:, own]).expand(run.B, -1).to(device)
    return {**dict.fromkeys(PADDING, padding), **dict.fromkeys(VALID, (~padding).long())}


def _packing(run: Run, own: Int[ndarray, " L"], device: str | torch.device) -> dict[str, Any]:
    """Return the arguments for packed documents, by parameter name.

    They are the documents' ends in the whole sequence, and the ids and positions of this rank's tokens. If the
    documents differ between sequences, there are no ends, and a row of ids and positions for each sequence.
    """
    if run.documents_of:
        masks = [Mask(documents=lengths) for lengths in run.documents_of]
        ids, positions = (
            torch.from_numpy(np.stack(rows))
            for rows in (
                [mask.document_of(own) for mask in masks],
                [mask.position_ids(own) for mask in masks],
            )
        )
        ids = _numbered(run, ids)
        return {**dict.fromkeys(IDS, ids.to(device)), "position_ids": positions.to(device)}
    documents = run.documents or (run.S,)
    ids = _numbered(run, torch.from_numpy(run.mask.document_of(own)))
    of_keys = run.key_documents or documents
    lengths = {name: of_keys if name.endswith(OF_KEYS) else documents for name in (*CU_SEQLENS, *MAX_SEQLENS)}
    return {
        **{name: _ends(lengths[name]).to(device) for name in CU_SEQLENS},
        **{name: max(lengths[name]) for name in MAX_SEQLENS},
        **dict.fromkeys(CU_PADDED, _ends(run.with_padding or (run.S,)).to(device)),
        **dict.fromkeys(IDS, ids.to(device)),
        "position_ids": torch.from_numpy(run.mask.position_ids(own)).to(device),
    }


def _numbered(run: Run, ids: Int[Tensor, "*B L"]) -> Int[Tensor, "*B L"]:
    """Return the segment ids of tokens in the documents 0, 1 and so on."""
    return torch.tensor(NUMBERED[run.numbered])[ids] if run.numbered else ids


def _ends(lengths: tuple[int, ...]) -> Int[Tensor, " ends"]:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
