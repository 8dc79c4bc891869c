"""The call of a target as Python text: the arguments that the suite would pass, and the results in the way of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ringlab.conformance.run.run import Run
from ringlab.conformance.target.argument_names import (
    CU_PADDED,
    CU_SEQLENS,
    GROUPS,
    IDS,
    MAX_SEQLENS,
    SOFTCAPS,
)
from ringlab.conformance.target.calling import arguments
from ringlab.conformance.target.claims import RING, Target
from ringlab.conformance.tolerance import NAMES


class Code(str):
    """An expression of the script in the place of a value."""

    def __repr__(self) -> str:
        """Return the expression as it is."""
        return str(self)


def known(run: Run, target: Target, owner: str) -> dict[str, Any]:
    """Return the expression of every argument that `RankPart` knows in such a run, by name. owner: of the target's options."""
    ring = Code("ring") if target.over == RING else None
    group = None if ring else Code("dist.group.WORLD")
    found: dict[str, Any] = {
        "ring": ring, "comm": Code("ring.comm") if ring else None, **dict.fromkeys(GROUPS, group), "rank": Code("rank"),
        "world_size": Code("P"), "causal": run.causal, "is_causal": run.causal, "layout": layout_of(run, target)[0],
        "positions": Code("[each.to(DEVICE) for each in POSITIONS]"), "scale": run.scale, "softmax_scale": run.scale, "return_lse": True,
    }  # fmt: skip
    if run.window:
        found |= {"window": run.window, "sliding_window": run.window}
        found |= {"window_size": (run.window - 1, 0 if run.causal else run.window - 1)}
        found |= {"window_left": run.window - 1} if run.causal else {}
    if run.softcap:
        found |= dict.fromkeys(SOFTCAPS, run.softcap)
    found |= {name: x for name, x in _packing(run).items() if run.documents or name in target.required}
    if (run.window or run.documents) and target.takes_mask:
        found |= {
            "mask": Code(f"Mask(causal={run.causal}, window={run.window or None}, documents={run.documents})")
        }
    return found | {name: Code(f"{owner}.options[{name!r}]") for name in target.options}


def _packing(run: Run) -> dict[str, Any]:
    lengths = run.documents or (run.S,)
    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    places = [place for length in lengths for place in range(length)]
    own = "torch.tensor({})[POSITIONS[rank]].to(DEVICE)"
    return {
        **dict.fromkeys(CU_SEQLENS, Code(f"torch.tensor({ends}, dtype=torch.int32, device=DEVICE)")),
        **dict.fromkeys(CU_PADDED, Code(f"torch.tensor({ends}, dtype=torch.int32, device=DEVICE)")),
        **dict.fromkeys(MAX_SEQLENS, max(lengths)),
        **dict.fromkeys(IDS, Code(own.format(ids))),
        "position_ids": Code(own.format(places)),
    }


def layout_of(run: Run, target: Target) -> tuple[Any, bool]:
    """The expression of the layout, and whether it is one of ringlab's."""
    if target.known_layout(run.layout, run.S, run.P) is None:
        return run.layout, False
    meant = target.layouts.get(run.layout, run.layout) if isinstance(target.layouts, Mapping) else run.layout
    dealing = {
        "token-fold": "chunk=1, folded=True",
        "chunk-3": "chunk=3",
        "chunk-5-folded": "chunk=5, folded=True",
    }
    made = f"dealt(S, P, {dealing[meant]})" if meant in dealing else f"get_layout({meant!r}, S, P)"
    return Code(made), True


def expression(function: Callable[..., Any], text: str, known: Mapping[str, Any]) -> str:
    """The call of `function`, called `text` in the script, with the arguments that the suite would pass."""
    positional, by_name = arguments(function, (Code("q"), Code("k"), Code("v")), known)
    listed = [*map(repr, positional), *(f"{name}={value!r}" for name, value in by_name.items())]
    return f"{text}({', '.join(listed)})"


CALLS = ("summed loss", "loss scale", "loss on lse", "backward again", "no_grad", "inference_mode", "q trained", "q and v trained", "k trained")  # fmt: skip
"""The ways of calling that a script can show; see `ringlab.conformance.run.call_patterns`."""
_TURNED = [
    "if lse is not None and lse.shape == (B, length, H) and length != H:",
    "    lse = lse.transpose(1, 2)",
]
_LSE_OF = {
    "BHLD": [],
    "BLHD": _TURNED,
    "LBHD": [
        *_TURNED,
        "elif lse is not None and lse.shape == (length, B, H):",
        "    lse = lse.permute(1, 2, 0)",
    ],
    "LHD": ["if lse is not None and lse.ndim == 2:", "    lse = (lse if lse.shape[0] == H else lse.T)[None]"],
}
"""Lines that give lse the axes (B, H, L), by the axes of the target."""


def names_of(run: Run, target: Target) -> tuple[str, ...]:
    """The results of the run, in the order in which the script's call gives them."""
    if run.use.endswith("trained"):
        return tuple(f"d{name}" for name in _trained(run))
    if run.use in ("loss on lse", "backward again"):
        return NAMES[2:]
    return NAMES if run.backward and run.use not in ("no_grad", "inference_mode") else NAMES[:2]


def _trained(run: Run) -> tuple[str, ...]:
    return tuple(name for name in "qkv" if name in run.use.removesuffix(" trained").split(" and "))


def call_lines(run: Run, target: Target, forward: str, backward: str) -> list[str]:
    """The lines of one call: (out, lse) from the target, and gradients in the way of the run."""
    if run.use in ("no_grad", "inference_mode"):
        lines = [f"with torch.{run.use}():", f"    made = {forward}"]
    else:
        trained = _trained(run) if run.use.endswith("trained") else tuple("qkv")
        lines = (
            [
                f"leaves = [x.requires_grad_() for x in ({', '.join(trained)}{',' if len(trained) == 1 else ''})]"
            ]
            if run.backward
            else []
        )
        lines += [f"made = {forward}"]
    lines += ["out, lse, *_ = (*made, None) if isinstance(made, (tuple, list)) else (made, None)"]
    lines += ["lse = lse if isinstance(lse, torch.Tensor) else None"]
    lines += ["length = len(POSITIONS[rank])", *_LSE_OF[target.axes]] if _LSE_OF[target.axes] else []
    names = names_of(run, target)
    if names == NAMES[:2]:
        return [*lines, "results = out, lse"]
    if run.use == "summed loss":
        lines += ["dout = torch.ones((), dtype=dout.dtype, device=dout.device).expand(dout.shape)"]
    if run.use == "backward again":
        lines += ["torch.autograd.grad(out, leaves, dout, retain_graph=True)"] if not backward else []
    if run.use == "loss on lse":
        own = "dlse()[..., POSITIONS[rank]].to(DEVICE)"
        return [*lines, f"results = torch.autograd.grad((out, lse), leaves, (dout, {own}))"]
    gradients = backward or "torch.autograd.grad(out, leaves, dout)"
    if backward:
        lines = [*lines, "q, k, v = q.detach(), k.detach(), v.detach()"]
    return [*lines, f"results = {gradients}" if names[0] != "out" else f"results = out, lse, *{gradients}"]
