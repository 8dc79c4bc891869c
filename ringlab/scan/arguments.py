"""The arguments of `linear_attention` on one rank: their checks, and a text by which ranks compare them.

No function of this module communicates.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import (
    DeviceError,
    DtypeError,
    LayoutError,
    MaskError,
    ShapeError,
)
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.scan.graph import Element, elements_of, plan_scan
from ringlab.scores import check_scale
from ringlab.torch_modes import refuse_transforms


@dataclass(frozen=True)
class Arguments:
    """The arguments of `linear_attention` on one rank. They are not checked yet, so any may be wrong."""

    q: Any
    k: Any
    v: Any
    ring: Ring
    layout: Layout
    decay: Any
    beta: Any
    scale: float | None
    documents: tuple[int, ...]
    initial_state: Any
    scan: str
    chunk: int
    return_state: bool
    validate: bool


@dataclass(frozen=True)
class ScanCall:
    """A call of linear attention: its arguments with every default filled in, and the elements of its scan.

    name: the name of this call, which is equal on all ranks. Ranks compare it in backward.
    """

    ring: Ring
    elements: tuple[Element, ...]
    scale: float
    scan: str
    chunk: int
    return_state: bool
    validate: bool
    name: str = ""

    @property
    def own(self) -> list[tuple[int, Element]]:
        """Return this rank's elements, each with its number in the chain."""
        return [(i, element) for i, element in enumerate(self.elements) if element.rank == self.ring.rank]


def check_arguments(given: Arguments) -> ScanCall:
    """Return the call that these arguments describe.

    Raises: ShapeError, DtypeError, DeviceError, LayoutError, MaskError, WorldSizeError, BackendError or
    GradientError for a wrong argument.
    """
    refuse_transforms(given.q, given.k, given.v, given.decay, given.beta, given.initial_state)
    check_ring(given.ring)
    if not isinstance(given.layout, Layout):
        raise LayoutError("layout= a ringlab layout, such as contiguous(S, P)", repr(given.layout))
    given.layout.of_ranks(given.ring.world_size)
    _check_tensors(given)
    check_scale(given.scale, given.q.dtype)
    if not isinstance(given.chunk, int) or isinstance(given.chunk, bool) or given.chunk < 1:
        raise ShapeError("chunk= a number of tokens ≥ 1", repr(given.chunk))
    elements = elements_of(given.layout, _check_documents(given.documents, given.layout))
    plan_scan(given.scan, elements)
    scale = given.q.shape[-1] ** -0.5 if given.scale is None else float(given.scale)
    return ScanCall(given.ring, elements, scale, given.scan, given.chunk, given.return_state, given.validate)


def describe_arguments(given: Arguments) -> str:
    """Return a text that describes the arguments and must be equal on all ranks."""
    q, v = given.q, given.v
    inputs = (q, given.k, v, given.decay, given.beta, given.initial_state)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    sizes = f"linear attention B={q.shape[0]} K={q.shape[1]} H={v.shape[1]} D={q.shape[3]} Dv={v.shape[3]} {q.dtype}"
    gates = "".join(
        f" {name}" for name in ("decay", "beta", "initial_state") if getattr(given, name) is not None
    )
    whole = f"{given.layout.ranks}{given.documents}"
    options = f"scan={given.scan} scale={given.scale} return_state={given.return_state} gradients={grad}"
    packed = f" documents={len(given.documents)}" if given.documents else ""
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return f"{given.layout!r}{packed} #{digest} {sizes}{gates} {options}"


def _check_tensors(given: Arguments) -> None:
    q, k, v = given.q, given.k, given.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} as a tensor (batch, heads, tokens, head dim)", str(got))
    length = given.layout.length(given.ring.rank)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape != k.shape or q.shape[0] != v.shape[0] or not q.shape[3]:
        raise ShapeError("q and k both (B, K, L, D), and v (B, H, L, Dv)", shapes)
    if not q.shape[1] or v.shape[1] % q.shape[1]:
        raise ShapeError(
            "heads of v divisible by those of q and k",
            f"{v.shape[1]} and {q.shape[1]}",
            "several heads of v may share one of q and k; repeat k and v for heads of q that share them",
        )
    if not q.shape[2] == v.shape[2] == length:
        raise ShapeError(
            f"q, k and v with the {length} tokens that rank {given.ring.rank} owns under {given.layout!r}",
            shapes,
            "pass layout.shard(x, ring.rank)",
        )
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        raise DtypeError(
            "q, k and v of one floating point dtype", str([x.dtype for x in (q, k, v)]), "use .to(dtype)"
        )
    if len({x.device for x in (q, k, v)}) > 1:
        raise DeviceError("q, k and v on one device", str([str(x.device) for x in (q, k, v)]))
    B, H, _, Dv = v.shape
    _check_beside("decay", given.decay, (B, H, length), v)
    _check_beside("beta", given.beta, (B, H, length), v)
    _check_beside("initial_state", given.initial_state, (B, H, q.shape[3], Dv), v)


def _check_beside(name: str, x: Any, shape: tuple[int, ...], v: Tensor) -> None:
    """Raise an error if an optional tensor does not fit v."""
    if x is None:
        return
    if not isinstance(x, Tensor) or tuple(x.shape) != shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        remedy = "one number for each head of v and each of this rank's tokens"
        if isinstance(x, Tensor) and x.ndim == 4 and name == "decay":
            remedy += "; a decay of its own for each channel of k, as in Kimi Delta Attention or GLA, is not supported"
        raise ShapeError(f"{name} as a tensor {shape}", str(got), "" if name == "initial_state" else remedy)
    if not x.is_floating_point():
        raise DtypeError(f"{name} of a floating point dtype", str(x.dtype))
    if x.device != v.device:
        raise DeviceError(f"{name} on the device of v", f"{x.device} and {v.device}")


def _check_documents(documents: Any, layout: Layout) -> tuple[int, ...]:
    if isinstance(documents, Mask):
        raise MaskError("documents=, a tuple of lengths in tokens", "a Mask", "pass mask.documents")
    return Mask(documents=documents).of_length(layout.S).documents
