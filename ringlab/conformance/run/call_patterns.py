"""The ways in which training and serving code calls a ring, besides a forward followed by its backward.

Each way is a function of one rank's part of a run, which returns results by name. These are compared with the
same oracle as the results of a plain call, because a way of calling must not change a result.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringlab.comm.virtual.threads import in_another_thread
from ringlab.conformance.run.caller_state import draw_numbers
from ringlab.conformance.run.meters import PassMeter
from ringlab.conformance.run.run import (
    COMPILED,
    GROWS,
    HALF_AFTERWARDS,
    MANY_MORE_LENGTHS,
    NO_REFUSALS,
    SAME_MEMORY,
    TWO_AT_ONCE,
    TWO_RINGS,
    Run,
    cotangent_of_lse,
    second_gradients,
)
from ringlab.conformance.run.troubles import WrongResult
from ringlab.conformance.target.claims import ORDERS, Target
from ringlab.errors import CommError

Tensors = dict[str, Tensor]
GRADIENTS = ("dq", "dk", "dv")
CALLS = 4
"""The number of calls before each of three readings of memory, or of four in a continuation."""
UNTIL_FULL = 144
"""The number of calls before the readings of a continuation: pools and caches with a limit, often of 128, are full then."""


class _Part(Protocol):
    """The interface of `ringlab.conformance.run.rank.RankPart` that this module needs."""

    run: Run
    device: str
    target: Target
    ring: Any

    def shards(self, shift: int = 0) -> tuple[Tensor, ...]: ...
    def own(self, whole: Float[Tensor, "B H S"]) -> Float[Tensor, "B H L"]: ...
    def own_of(self, whole: Float[Tensor, "B H S D"]) -> Float[Tensor, "..."]: ...
    def attend(self, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]: ...
    def gradients(
        self, leaves: tuple[Tensor, ...], dout: Tensor, out: Tensor, lse: Tensor | None, retain: bool = False
    ) -> Any: ...
    def note(self, kind: str, text: str) -> None: ...
    def elsewhere(self) -> AbstractContextManager[None]: ...
    def compiled(self) -> AbstractContextManager[None]: ...
    def asking(self, run: Run) -> AbstractContextManager[None]: ...
    def with_other_arguments(self, layout: str) -> AbstractContextManager[None]: ...
    @property
    def other_layout(self) -> str: ...
    @property
    def with_other_values(self) -> Run: ...
    @property
    def without_arguments(self) -> Run: ...
    def totals(self, numbers: Sequence[int]) -> list[int]: ...
    def meet(self) -> None: ...
    def turn(self) -> AbstractContextManager[None]: ...
    def meet_all(self) -> None: ...
    def twins(self) -> Sequence[Any]: ...
    def counted(self) -> AbstractContextManager[PassMeter]: ...


@dataclass(frozen=True)
class CallPattern:
    """One way of calling. check: the line of the report. changes: the fields of the run that it changes.

    autograd: whether the pattern needs a graph. backward: whether the pattern is about gradients; other
    patterns also apply to a target without gradients.
    """

    check: str
    call: Callable[[_Part], Tensors]
    changes: Mapping[str, Any] = field(default_factory=dict)
    autograd: bool = False
    backward: bool = True


def _leaves(shards: tuple[Tensor, ...], trained: str = "qkv") -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_(name in trained) for name, x in zip("qkv", shards, strict=False))


def _both(part: _Part, shards: tuple[Tensor, ...], dout: Tensor | None = None) -> Tensors:
    """Return the results of a forward and, if the target has one, its backward; `dout` replaces the run's."""
    leaves = _leaves(shards, "qkv" if part.run.backward else "")
    out, lse = part.attend(leaves)
    if not part.run.backward:
        return _results(out, lse)
    dout = shards[3] if dout is None else dout
    returned = _results(out, lse)
    kept = {name: x.clone() for name, x in returned.items()}
    gradients = _named(part.gradients(leaves, dout, out, lse))
    for name, x in returned.items():
        if not torch.allclose(x, kept[name], rtol=0.0, atol=0.0, equal_nan=True):
            part.note("use", f"backward overwrites {name}, which the forward returned")
    return {**kept, **gradients}


def _results(out: Tensor, lse: Tensor | None) -> Tensors:
    return {"out": out.detach(), **({} if lse is None else {"lse": lse.detach()})}


def _named(gradients: Any) -> Tensors:
    return dict(zip(GRADIENTS, gradients, strict=True))


def _summed(part: _Part) -> Tensors:
    """Return the results of `out.sum().backward()`, whose dout is one number that is read with stride 0."""
    shards = part.shards()
    return _both(
        part, shards, torch.ones((), dtype=shards[3].dtype, device=part.device).expand(shards[3].shape)
    )


def _whole(part: _Part) -> Tensors:
    return _both(part, part.shards())


def _through_lse(alone: bool, part: _Part) -> Tensors:
    """Return the gradients of a loss on out and lse, as a z-loss or a merge of partials makes it.

    alone: whether autograd gets no gradient of out at all.
    """
    shards = part.shards()
    leaves = _leaves(shards)
    out, lse = part.attend(leaves)
    if lse is None or not lse.requires_grad:
        part.note(
            "refused", "no lse is returned" if lse is None else "lse has no gradient, and autograd says so"
        )
        return {}
    dlse = part.own(cotangent_of_lse(part.run))
    if not alone:
        return _named(torch.autograd.grad((out, lse), leaves, (shards[3], dlse)))
    gradients = torch.autograd.grad(lse, leaves, dlse, allow_unused=True)
    return _named(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))


def _retained(part: _Part) -> Tensors:
    """Return the gradients of a forward's second backward (`retain_graph=True`), as with several losses.

    The first backward has another gradient of out.
    """
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv))
    out, lse = part.attend(leaves)
    part.gradients(leaves, part.shards(1)[3], out, lse, retain=True)
    return _named(part.gradients(leaves, dout, out, lse))


def _first_in_first_out(part: _Part) -> Tensors:
    """Return the results of the first of five micro-batches in flight, as in a pipeline.

    All forwards come first, and then the backward of this micro-batch. One other call has no arguments, and one
    has other values of them, so that the result is wrong if the arguments of another call are used.
    """
    run = part.run
    return _in_flight(part, (run, run, part.without_arguments, run, part.with_other_values))[0]


def _last_in_first_out(part: _Part) -> Tensors:
    """Return the results of the first of two calls, whose backward comes last, as in a model of two layers.

    The second call has none of the arguments of the first.
    """
    return _in_flight(part, (part.run, part.without_arguments), last_first=True)[0]


def _in_flight(part: _Part, runs: Sequence[Run], last_first: bool = False) -> list[Tensors]:
    """Return the results of calls whose forwards all come before the first backward."""
    calls, order = [], range(len(runs))
    for shift, run in enumerate(runs):
        with part.asking(run):
            *qkv, dout = part.shards(shift)
            leaves = _leaves(tuple(qkv))
            calls.append((leaves, dout, *part.attend(leaves)))
    found: dict[int, Tensors] = {}
    for place in order[::-1] if last_first else order:
        leaves, dout, out, lse = calls[place]
        with part.asking(runs[place]):
            found[place] = {**_results(out, lse), **_named(part.gradients(leaves, dout, out, lse))}
    return [found[place] for place in order]


def _in_between(call: Callable[[_Part], Any], part: _Part) -> Tensors:
    """Return the results of a forward and its backward, with another call between them."""
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv))
    out, lse = part.attend(leaves)
    call(part)
    return {**_results(out, lse), **_named(part.gradients(leaves, dout, out, lse))}


def _evaluate(part: _Part) -> None:
    with torch.no_grad():
        part.attend(part.shards(1)[:3])


def _call_elsewhere(part: _Part) -> None:
    with part.elsewhere():
        part.attend(_leaves(part.shards(1)[:3]))


def _abandoned(part: _Part) -> Tensors:
    """Return the results after forwards without a backward, as in a step that is skipped for its loss.

    One of them has other arguments.
    """
    for run in (part.run, part.without_arguments):
        with part.asking(run):
            part.attend(_leaves(part.shards(1)[:3]))
    return _whole(part)


def _fail(part: _Part) -> None:
    """Make a call that must fail: without v, or on a single rank with a token too few in v.

    On several ranks, even a right ring may send a shard before it looks at its shape. The message would then
    never be received.
    """
    q, k, v, _ = part.shards(1)
    tokens = part.target.axes.index("L")
    wrong: Any = v.narrow(tokens, 0, v.shape[tokens] - 1) if part.run.P == 1 else None
    with suppress(Exception):
        part.attend((q, k, wrong))
    part.meet()


def _after_an_error(part: _Part) -> Tensors:
    """Return the results of a right call after one that failed."""
    _fail(part)
    return _whole(part)


def _two_inferences(part: _Part) -> Tensors:
    """Return the results of a call under no_grad, read after a second one."""
    with torch.no_grad():
        # The inputs need a gradient under no_grad too, as the parameters of a model do.
        first = part.attend(_leaves(part.shards()[:3], "qkv" if part.target.backward else ""))
        part.attend(part.shards(1)[:3])
    return _results(*first)


def _under_autocast(part: _Part) -> Tensors:
    """Return the results of a forward under autocast, followed by a backward outside it, as PyTorch advises.

    Under autocast, a product of float32 tensors is rounded to bfloat16, although the code says float32.
    """
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv), "qkv" if part.run.backward else "")
    with torch.autocast(torch.device(part.device).type, torch.bfloat16):
        out, lse = part.attend(leaves)
    if not part.run.backward:
        return _results(out, lse)
    return {**_results(out, lse), **_named(part.gradients(leaves, dout, out, lse))}


def _after_inference(part: _Part) -> Tensors:
    """Return the results of a training call after one under inference_mode, whose tensors autograd cannot save."""
    with torch.inference_mode():
        part.attend(part.shards(1)[:3])
    return _whole(part)


def _with_another_default(part: _Part) -> Tensors:
    """Return the results while the default dtype of new tensors is bfloat16, as inference engines set it."""
    part.meet()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    part.meet()
    try:
        return _whole(part)
    finally:
        part.meet()  # virtual ranks share the default dtype
        torch.set_default_dtype(before)
        part.meet()


_REMEDY = "@torch.autograd.function.once_differentiable on backward refuses such a loss"


def _of_gradients(part: _Part) -> Tensors:
    """Return the results; note gradients of gradients that are wrong, as a gradient penalty would use them.

    An error, or gradients that have no gradient, are right answers: no ring has to support this.
    """
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv))
    out, _ = part.attend(leaves)
    kept = out.detach().clone()
    first = torch.autograd.grad(out, leaves, dout, create_graph=True)
    found = {"out": kept, **{name: x.detach() for name, x in zip(GRADIENTS, first, strict=True)}}
    loss = sum((x * x.detach()).sum() for x in first if x.requires_grad)
    second: tuple[Tensor | None, ...] = (None, None, None)
    if isinstance(loss, Tensor):
        with suppress(RuntimeError):
            second = torch.autograd.grad(loss, leaves, allow_unused=True)
    part.meet()
    if all(x is None for x in second):
        part.note("refused", "gradients of gradients are refused")
        return found
    true = second_gradients(part.run)
    for name, x, right in zip("qkv", second, true, strict=True):
        own = part.own_of(right)
        if x is None or (x - own).abs().max() > 0.01 * right.abs().max():
            part.note(
                "use", f"the gradient of a loss on gradients is wrong in {name}, without an error: {_REMEDY}"
            )
    return found


def _without(mode: Callable[[], AbstractContextManager[Any]], part: _Part) -> Tensors:
    with mode():
        return _results(*part.attend(part.shards()[:3]))


def _frozen(trained: str, part: _Part) -> Tensors:
    """Return the gradients if only some inputs need one, as with adapters on q, or on q and v."""
    shards = part.shards()
    leaves = _leaves(shards, trained)
    out, _ = part.attend(leaves)
    wanted = [x for x in leaves if x.requires_grad]
    return dict(
        zip((f"d{name}" for name in trained), torch.autograd.grad(out, wanted, shards[3]), strict=True)
    )


def _overwritten(what: str, part: _Part) -> Tensors:
    """Return the results if inputs or out are changed in place before backward.

    If the target saved the changed tensor, the run ends with autograd's error.
    """
    shards = part.shards()
    leaves, dout = _leaves(shards), shards[3]
    out, lse = part.attend(leaves)
    if what == "out":
        out, dout = out.mul_(2), dout / 2  # the factor 2 is in the graph, so halving dout keeps the gradients
        return _named(torch.autograd.grad(out, leaves, dout))
    kept = _results(out, lse)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.5)
    return {**kept, **_named(torch.autograd.grad(out, leaves, dout))}


def _recomputed(part: _Part) -> Tensors:
    """Return the results if the forward is repeated in backward, as in activation checkpointing."""
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv))
    out, _ = checkpoint(lambda *tensors: part.attend(tensors), *leaves, use_reentrant=False)
    return {"out": out.detach(), **_named(torch.autograd.grad(out, leaves, dout))}


def _backward_elsewhere(part: _Part) -> Tensors:
    """Return the results if backward runs in a thread other than that of forward, as autograd's does on a GPU."""
    *qkv, dout = part.shards()
    leaves = _leaves(tuple(qkv))
    out, lse = part.attend(leaves)
    gradients = in_another_thread(lambda: part.gradients(leaves, dout, out, lse))
    return {**_results(out, lse), **_named(gradients)}


def _two_at_once(part: _Part) -> Tensors:
    """Return the results of a call during which the process makes another one, on another ring with other inputs.

    A difference from the results of the same call alone is noted. Over ringlab's Comm, two rings call at the
    same time: virtual ranks take turns at messages, and ranks with the same number in both rings share the
    state that a module keeps. Over torch.distributed, each process has two threads.
    """
    if part.ring is not None:
        with part.turn():
            alone = _whole(part)
        part.meet_all()
        *qkv, dout = part.shards()
        leaves = _leaves(tuple(qkv), "qkv" if part.run.backward else "")
        out, lse = part.attend(leaves)
        found = _results(out, lse)
        part.meet_all()
        found |= _named(part.gradients(leaves, dout, out, lse)) if part.run.backward else {}
        _compare_with_alone(part, found, alone)
        part.meet_all()
        return found
    twins = part.twins()
    alone_of = [_whole(twin) for twin in twins]
    part.meet()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SOON)
    try:
        with ThreadPoolExecutor(len(twins)) as threads:
            made = [list(threads.map(_whole, twins)) for _ in range(_TIMES)]
    finally:
        sys.setswitchinterval(interval)
    part.meet()
    for together in made:
        for twin, found, alone in zip(twins, together, alone_of, strict=True):
            _compare_with_alone(twin, found, alone)
    return made[0][0]


_TIMES, _SOON = 5, 1e-5
"""How often two threads call at once, and after how many seconds the other thread may run."""


def _compare_with_alone(part: _Part, found: Tensors, alone: Tensors) -> None:
    for name, x in found.items():
        right = alone[name]
        if not torch.allclose(x.double(), right.double(), rtol=0.01, atol=0.01 * float(right.abs().max())):
            part.note("use", f"{name} is another one while another thread of the process makes a call too")


def _compiled(part: _Part) -> Tensors:
    """Return the results of the second call of a function that torch.compile has traced in a first call.

    An error during tracing counts as a refusal. A result of a wrong form, and ranks that wait for each other, do not.
    """
    with part.compiled():
        try:
            _both(part, part.shards(1))
        except (CommError, WrongResult):
            raise
        except Exception as error:
            part.note("refused", f"under torch.compile it raises {type(error).__name__}")
            return {}
        return _whole(part)


def _same_memory(part: _Part) -> Tensors:
    """Return the results for other values in the same tensors, as in a training loop with static buffers.

    Tensors of arguments, such as the ends of packed documents, keep their memory too, and so do positions. All
    are filled through `.data`, as parameters are from a checkpoint or an average of weights, so no version
    counter of a tensor shows the change.
    """
    held, fresh = part.shards(1), part.shards()
    try:
        with part.with_other_arguments(part.other_layout):
            _both(part, held)
    except Exception as error:
        if part.other_layout not in ORDERS or type(error).__name__ in NO_REFUSALS:
            raise
        with part.with_other_arguments(part.run.layout):  # the order is refused, on all ranks
            _both(part, held)
    for x, new in zip(held, fresh, strict=True):
        x.data.copy_(new)
    return _both(part, held)


def _many_calls(part: _Part) -> Tensors:
    """Return the results of the last of many calls; note it if memory grows with each call.

    If memory grows at first, many more calls must show that the growth ends, as in a pool of buffers with a
    limit. Python's garbage collector does not run meanwhile, because GPU memory that waits for it is not free.
    """
    found: Tensors = {}
    live: list[int] = []

    def read(calls: int) -> None:
        nonlocal found
        for _ in range(calls):
            found = {}
            found = _whole(part)
        part.meet()
        live.append(meter.memory.live_bytes)
        part.meet()

    with part.counted() as meter, _no_collection():
        for _ in range(3):
            read(CALLS)
        (grows,) = part.totals([int(live[2] > live[0])])
        if not grows:
            return found
        live = []
        for calls in (UNTIL_FULL, *[4 * CALLS] * 3):
            read(calls)
        gc.collect()
        part.meet()
        collected = live[-1] - meter.memory.live_bytes
    rises = [after - before for before, after in pairwise(live)]
    if min(rises) > 0:
        made = 15 * CALLS + UNTIL_FULL
        until = ", until Python's garbage collector runs" if collected >= sum(rises) else ""
        share = f"{sum(rises) // (12 * CALLS):,} bytes more are held after each call"
        part.note("use", f"{share}, and after {made} calls still{until}")
    return found


def _many_lengths(count: int, part: _Part) -> Tensors:
    """Return the results of a call after others of `count` lengths; note it if memory grows with each length.

    The longest call comes first, so that a buffer for the longest call so far does not grow. No other run has shards
    of these lengths, because what the process keeps for them would not grow here.
    """
    run, live = part.run, list[int]()
    with part.counted() as meter:
        for shorter in range(count):
            with part.asking(replace(run, S=run.S - 2 * run.P * shorter)):
                _whole(part)
            part.meet()
            live.append(meter.memory.live_bytes)
        live = part.totals(live)
        rises = [after > before for before, after in pairwise(live)][-_LAST:]
        if sum(rises) > _LAST - 3:
            gc.collect()  # memory that waits for the collector is judged by many calls of one length
            (left,) = part.totals([meter.memory.live_bytes])
            if left > live[0]:
                part.note(GROWS, f"{left - live[0]:,} bytes more are held after calls of {count} lengths")
    return _whole(part)


_LAST = 8
"""The number of lengths that show growth, after those that fill a cache with a limit."""
_FEW, _MORE = 12, 160
"""The numbers of lengths. Many caches hold 128 entries, which is also the default of functools.lru_cache."""


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _side_effects(part: _Part) -> Tensors:
    """Return the results of a call; note a change of the number of process groups.

    Other changes to the state of the process are noted in every call; see `caller_state`.
    """
    _whole(part)  # groups that only the first call creates are allowed
    part.meet()
    draw_numbers()
    part.meet()
    groups = len(_groups())
    found = _whole(part)
    part.meet()
    if len(_groups()) != groups:
        part.note("state", "a call changed the number of process groups")
    return found


def _groups() -> Any:
    return torch.distributed.distributed_c10d._world.pg_map if torch.distributed.is_available() else ()


OTHER_GROUP = "half of the ranks in between"
CALL_PATTERNS: dict[str, CallPattern] = {
    "summed loss": CallPattern("summed loss", _summed, {"dout": "ones"}),
    "loss scale": CallPattern("loss scale", _whole, {"dout": "large"}),
    "loss of the last token": CallPattern("zeros", _whole, {"dout": "last token"}),
    "loss of the second half": CallPattern("zeros", _whole, {"dout": "second half", "P": 4}),
    "rows of zeros": CallPattern("zeros", _whole, {"values": "zeros", "P": 4}, backward=False),
    "loss on lse": CallPattern(
        "gradient of lse", partial(_through_lse, False), {"dlse": True}, autograd=True
    ),
    "loss on lse alone": CallPattern(
        "gradient of lse", partial(_through_lse, True), {"dlse": True, "dout": "zeros"}, autograd=True
    ),
    "backward again": CallPattern("backward again", _retained),
    "five in flight": CallPattern("calls in flight", _first_in_first_out),
    "layers that differ": CallPattern("calls in flight", _last_in_first_out),
    "evaluated in between": CallPattern("calls in flight", partial(_in_between, _evaluate)),
    "a step skipped": CallPattern("calls in flight", _abandoned),
    "an error in between": CallPattern("calls in flight", partial(_in_between, _fail)),
    OTHER_GROUP: CallPattern("two groups", partial(_in_between, _call_elsewhere)),
    "autocast": CallPattern("autocast", _under_autocast, {"dtype": "bfloat16"}, backward=False),
    "no_grad": CallPattern("inference", partial(_without, torch.no_grad), backward=False),
    "inference_mode": CallPattern("inference", partial(_without, torch.inference_mode), backward=False),
    "trained after inference_mode": CallPattern("inference", _after_inference, {"S": 40}, autograd=True),
    "another default dtype": CallPattern(
        "default dtype", _with_another_default, {"P": 8, "dtype": "bfloat16"}, backward=False
    ),
    "a loss on gradients": CallPattern("second derivatives", _of_gradients, autograd=True),
    "two under no_grad": CallPattern("inference", _two_inferences, backward=False),
    "q trained": CallPattern("frozen inputs", partial(_frozen, "q"), autograd=True),
    "q and v trained": CallPattern("frozen inputs", partial(_frozen, "qv"), autograd=True),
    "k trained": CallPattern("frozen inputs", partial(_frozen, "k"), autograd=True),
    "v trained": CallPattern("frozen inputs", partial(_frozen, "v"), autograd=True),
    "inputs changed": CallPattern("changed in place", partial(_overwritten, "inputs"), autograd=True),
    "out changed": CallPattern("changed in place", partial(_overwritten, "out"), autograd=True),
    "recomputed": CallPattern("recomputation", _recomputed, autograd=True),
    "backward in another thread": CallPattern("other threads", _backward_elsewhere, autograd=True),
    COMPILED: CallPattern("compilation", _compiled, backward=False),
    TWO_RINGS: CallPattern("two rings", _whole, backward=False),
    TWO_AT_ONCE: CallPattern("two threads", _two_at_once, backward=False),
    HALF_AFTERWARDS: CallPattern("two groups", _whole, backward=False),
    SAME_MEMORY: CallPattern("same memory", _same_memory, backward=False),
    "many calls": CallPattern("many calls", _many_calls, backward=False),
    "many lengths": CallPattern("many calls", partial(_many_lengths, _FEW), {"S": 796}, backward=False),
    MANY_MORE_LENGTHS: CallPattern("many calls", partial(_many_lengths, _MORE), {"S": 1440}, backward=False),
    "side effects": CallPattern("side effects", _side_effects, backward=False),
    "after an error": CallPattern("side effects", _after_an_error, backward=False),
    "after a wrong shape": CallPattern("side effects", _after_an_error, {"P": 1}, backward=False),
}
"""All call patterns, by their names in `Run.use`."""
