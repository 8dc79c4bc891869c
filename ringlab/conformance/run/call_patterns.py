"""The ways in which training and serving code calls a ring, beside a forward and its backward at once.

Each is a function of one rank's part of a run. It returns results by name, which are held to the same oracle as those of a
plain call: a way of calling changes no result.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringlab.conformance.run.meters import PassMeter
from ringlab.conformance.run.run import TWO_RINGS, Run, cotangent_of_lse

Tensors = dict[str, Tensor]
GRADIENTS = ("dq", "dk", "dv")
CALLS = 4
"""How many calls are made before memory is read, three times: a cache may fill at first, but must not keep growing by the same bytes."""


class _Part(Protocol):
    """One rank's part of a run, as `ringlab.conformance.run.rank.RankPart` has it."""

    run: Run
    device: str

    def shards(self, shift: int = 0) -> tuple[Tensor, ...]: ...
    def own(self, whole: Float[Tensor, "B H S"]) -> Float[Tensor, "B H L"]: ...
    def attend(self, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]: ...
    def gradients(
        self, leaves: tuple[Tensor, ...], dout: Tensor, out: Tensor, lse: Tensor | None, retain: bool = False
    ) -> Any: ...
    def note(self, kind: str, text: str) -> None: ...
    def meet(self) -> None: ...
    def counted(self) -> AbstractContextManager[PassMeter]: ...


@dataclass(frozen=True)
class CallPattern:
    """One way of calling. check: the line of the report; changes: fields of the run.

    autograd: it needs a graph. backward: it is about gradients; other patterns are asked of a target without gradients, too.
    """

    check: str
    call: Callable[[_Part], Tensors]
    changes: Mapping[str, Any] = field(default_factory=dict)
    autograd: bool = False
    backward: bool = True


def _leaves(shards: tuple[Tensor, ...], trained: str = "qkv") -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_(name in trained) for name, x in zip("qkv", shards, strict=False))


def _both(part: _Part, shards: tuple[Tensor, ...], dout: Tensor | None = None) -> Tensors:
    """A forward and its backward, if the target has one; gradients of `dout` instead of the run's own if it is given."""
    leaves = _leaves(shards, "qkv" if part.run.backward else "")
    out, lse = part.attend(leaves)
    if not part.run.backward:
        return _results(out, lse)
    dout = shards[3] if dout is None else dout
    return {**_results(out, lse), **_named(part.gradients(leaves, dout, out, lse))}


def _results(out: Tensor, lse: Tensor | None) -> Tensors:
    return {"out": out.detach(), **({} if lse is None else {"lse": lse.detach()})}


def _named(gradients: Any) -> Tensors:
    return dict(zip(GRADIENTS, gradients, strict=True))


def _summed(part: _Part) -> Tensors:
    """`out.sum().backward()`: dout is one number, read with stride 0."""
    shards = part.shards()
    return _both(
        part, shards, torch.ones((), dtype=shards[3].dtype, device=part.device).expand(shards[3].shape)
    )


def _whole(part: _Part) -> Tensors:
    return _both(part, part.shards())


def _through_lse(part: _Part) -> Tensors:
    """A loss on lse too, as a z-loss has and every merge of partials."""
    shards = part.shards()
    leaves = _leaves(shards)
    out, lse = part.attend(leaves)
    if lse is None or not lse.requires_grad:
        part.note(
            "refused", "no lse is returned" if lse is None else "lse has no gradient, and autograd says so"
        )
        return {}
    dlse = part.own(cotangent_of_lse(part.run))
    return _named(torch.autograd.grad((out, lse), leaves, (shards[3], dlse)))


def _retained(part: _Part) -> Tensors:
    """The second backward of one forward, as with several losses: `retain_graph=True`."""
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv))
    out, lse = part.attend(leaves)
    part.gradients(leaves, dout, out, lse, retain=True)
    return _named(part.gradients(leaves, dout, out, lse))


def _first_in_first_out(part: _Part) -> Tensors:
    """Three micro-batches in flight, as in a pipeline: the first forward's backward comes first, after all forwards."""
    calls = []
    for shift in range(3):
        *qkv, dout = part.shards(shift)
        leaves = _leaves(tuple(qkv))
        calls.append((leaves, dout, *part.attend(leaves)))
    found = [
        {**_results(out, lse), **_named(part.gradients(leaves, dout, out, lse))}
        for leaves, dout, out, lse in calls
    ]
    return found[0]


def _without(mode: Callable[[], AbstractContextManager[Any]], part: _Part) -> Tensors:
    with mode():
        return _results(*part.attend(part.shards()[:3]))


def _frozen(trained: str, part: _Part) -> Tensors:
    """Only some inputs need gradients, as with adapters on q, or on q and v."""
    shards = part.shards()
    leaves = _leaves(shards, trained)
    out, _ = part.attend(leaves)
    wanted = [x for x in leaves if x.requires_grad]
    return dict(
        zip((f"d{name}" for name in trained), torch.autograd.grad(out, wanted, shards[3]), strict=True)
    )


def _overwritten(what: str, part: _Part) -> Tensors:
    """Inputs, or out, changed in place before backward: the run ends with autograd's error if it saves what was changed."""
    shards = part.shards()
    leaves, dout = _leaves(shards), shards[3]
    out, lse = part.attend(leaves)
    if what == "out":
        out, dout = out.mul_(2), dout / 2  # the factor is in the graph: the gradients are the same
        return _named(torch.autograd.grad(out, leaves, dout))
    kept = _results(out, lse)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.5)
    return {**kept, **_named(torch.autograd.grad(out, leaves, dout))}


def _recomputed(part: _Part) -> Tensors:
    """The forward made again in backward, as under activation checkpointing."""
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv))
    out, _ = checkpoint(lambda *tensors: part.attend(tensors), *leaves, use_reentrant=False)
    return {"out": out.detach(), **_named(torch.autograd.grad(out, leaves, dout))}


def _same_memory(part: _Part) -> Tensors:
    """Other values in the same tensors, as in a training loop with static buffers."""
    held, fresh = part.shards(1), part.shards()
    _both(part, held)
    with torch.no_grad():
        for x, new in zip(held, fresh, strict=True):
            x.copy_(new)
    return _both(part, held)


def _many_calls(part: _Part) -> Tensors:
    """Calls after calls: each may hold no more than the one before."""
    live: list[int] = []
    found: Tensors = {}
    with part.counted() as meter:
        for _ in range(3):
            for _ in range(CALLS):
                found = {}
                found = _whole(part)
            part.meet()
            gc.collect()
            live.append(meter.memory.live_bytes)
            part.meet()
    grown = live[1] - live[0]
    if grown > 0 and live[2] - live[1] == grown:
        part.note("use", f"{grown // CALLS:,} bytes more are held after each call")
    return found


def _side_effects(part: _Part) -> Tensors:
    """State of the whole process: random numbers, default dtype, autograd's and torch's modes, process groups."""
    modes = _modes()
    part.meet()
    _whole(part)  # what is made once, at the first call, is set-up
    part.meet()
    torch.rand(1), np.random.random()  # a target that seeds leaves what it left before
    part.meet()
    drawn, groups = _generators(), len(_groups())
    found = _whole(part)
    part.meet()
    changed = [name for name, value in _modes().items() if value != modes[name]]
    changed += [name for name, value in _generators().items() if value != drawn[name]]
    changed += ["the number of process groups"] if len(_groups()) != groups else []
    part.meet()  # the first rank that ends puts the modes back
    if changed:
        part.note("use", f"a call changed {' and '.join(changed)}")
    return found


def _modes() -> dict[str, Any]:
    return {
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": torch.is_grad_enabled(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
    }


@contextmanager
def kept_modes() -> Iterator[None]:
    """Restore torch's modes afterwards, so that what a target leaves behind reaches no other run."""
    modes = _modes()
    try:
        yield
    finally:
        torch.set_default_dtype(modes["the default dtype"])
        torch.set_grad_enabled(modes["the grad mode"])
        deterministic = modes["torch's deterministic mode"]
        if (
            torch.are_deterministic_algorithms_enabled() != deterministic
        ):  # setting it imports torch's compiler
            torch.use_deterministic_algorithms(deterministic)


def _generators() -> dict[str, Any]:
    """Python's own is left out: packages that check types draw from it."""
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else ()
    return {
        "torch's random numbers": (torch.get_rng_state().tolist(), cuda),
        "NumPy's random numbers": str(np.random.get_state()),
    }


def _groups() -> Any:
    return torch.distributed.distributed_c10d._world.pg_map if torch.distributed.is_available() else ()


CALL_PATTERNS: dict[str, CallPattern] = {
    "summed loss": CallPattern("summed loss", _summed, {"dout": "ones"}),
    "loss scale": CallPattern("loss scale", _whole, {"dout": "large"}),
    "loss on lse": CallPattern("gradient of lse", _through_lse, {"dlse": True}, autograd=True),
    "backward again": CallPattern("backward again", _retained),
    "three in flight": CallPattern("calls in flight", _first_in_first_out),
    "no_grad": CallPattern("inference", partial(_without, torch.no_grad), backward=False),
    "inference_mode": CallPattern("inference", partial(_without, torch.inference_mode), backward=False),
    "q trained": CallPattern("frozen inputs", partial(_frozen, "q"), autograd=True),
    "q and v trained": CallPattern("frozen inputs", partial(_frozen, "qv"), autograd=True),
    "k trained": CallPattern("frozen inputs", partial(_frozen, "k"), autograd=True),
    "inputs changed": CallPattern("changed in place", partial(_overwritten, "inputs"), autograd=True),
    "out changed": CallPattern("changed in place", partial(_overwritten, "out"), autograd=True),
    "recomputed": CallPattern("recomputation", _recomputed, autograd=True),
    TWO_RINGS: CallPattern("two rings", _whole, backward=False),
    "same memory": CallPattern("same memory", _same_memory, backward=False),
    "many calls": CallPattern("many calls", _many_calls, backward=False),
    "side effects": CallPattern("side effects", _side_effects, backward=False),
}
"""Every call pattern, by the name in `Run.use`."""
