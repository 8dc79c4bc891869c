"""One rank's part of a run: it calls the target with the rank's shards, and records the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringlab import oracle
from ringlab.comm.protocol import Comm
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.comm.wrappers.strict import Strict
from ringlab.conformance.run.arguments import given
from ringlab.conformance.run.call_patterns import CALL_PATTERNS
from ringlab.conformance.run.caller_state import unchanged
from ringlab.conformance.run.memory_forms import FORMS, away_in
from ringlab.conformance.run.meters import Metered, PassMeter, UnwrittenIsNaN
from ringlab.conformance.run.run import (
    GIVEN,
    HALF_AFTERWARDS,
    HALVED,
    SPELLINGS,
    TWO_AT_ONCE,
    Meter,
    RankResult,
    Run,
    inputs,
)
from ringlab.conformance.run.troubles import WrongResult
from ringlab.conformance.target.argument_names import GROUPS, SCALES, TRAINED
from ringlab.conformance.target.calling import (
    arguments,
    as_axes,
    call,
    called,
    from_axes,
    tensors_of,
)
from ringlab.conformance.target.claims import ORDERS, Target
from ringlab.layout import layout_names

Tensors = dict[str, Tensor]


class RankPart:
    """One rank's work in one run. `ring` is None for a target over torch.distributed."""

    def __init__(
        self,
        target: Target,
        run: Run,
        rank: int,
        ring: Ring | None,
        device: str = "cpu",
        on_send: Callable[[], None] = lambda: None,
    ) -> None:
        self.group: Any = None
        self.target = target
        self.all = run, rank, ring
        if run.use in HALVED or (run.use == TWO_AT_ONCE and ring is not None):
            run, rank, ring = self._halved(run, rank, ring)
        self.run, self.rank, self.device, self.on_send = run, rank, device, on_send
        self._deal()
        self.metered: Metered | None = None
        if ring is not None:
            self.metered = Metered(Strict(ring.comm) if run.strict else ring.comm)
            ring = Ring(self.metered)
        self.ring = ring
        self.notes: list[tuple[str, str]] = []
        self.meters: list[Meter] = []
        self.begun = self.returned = 0  # calls of the target in forward
        self.trained: Tensor | None = None  # the latest call's argument that needs a gradient
        self.of_trained: np.ndarray | None = None
        self.queries: tuple[float, ...] = ()  # sums of the latest call's q
        self.held: dict[str, Tensor] | None = None  # tensors of arguments that keep their memory
        self.held_positions: list[Tensor] = []  # positions of all ranks, which keep their memory too
        self.handed: dict[str, Any] = {}  # the latest call's arguments besides q, k and v
        self.calls: Callable[..., Any] = partial(
            called, target.function
        )  # with positional and named arguments

    def _deal(self) -> None:
        run = self.run
        self.positions = self._dealt(run.S)
        self.key_positions = self._dealt(run.keys)[self.rank] if run.keys else self.positions[self.rank]

    def _dealt(self, S: int) -> list[np.ndarray]:
        """Return each rank's positions. Raises: WrongResult for an error of the target's own layout.

        Such an error must not count as a refusal.
        """
        run = self.run
        try:
            return self.target.positions(run.layout, S, run.P, run.with_padding)
        except Exception as error:
            raise WrongResult(
                f"the layout {run.layout!r} fails with {type(error).__name__}: {error}"
            ) from error

    def result(self) -> RankResult:
        """Return the rank's results from its first call."""
        # Restore the grad mode, because it belongs to the thread, which makes other runs too.
        # Rows of padding must be finite whatever memory holds.
        unwritten = UnwrittenIsNaN() if self.run.any_padding else nullcontext()
        with torch.set_grad_enabled(torch.is_grad_enabled()), unwritten:
            return self._result()

    def _result(self) -> RankResult:
        own = self.positions[self.rank]
        if self.run.use == HALF_AFTERWARDS:
            with self._as_part_of(*self.all, None):
                self.attend(self.shards(1)[:3])
        if self.run.use:
            with self.turn() if self.run.use != TWO_AT_ONCE else nullcontext():
                found = CALL_PATTERNS[self.run.use].call(self)
            arrays = {name: self._whole_precision(name, x) for name, x in found.items()}
            self._finite(arrays)
            notes = list(dict.fromkeys(self.notes))
            return RankResult(own, self.key_positions, arrays, notes, of_trained=self.of_trained)
        first = self._call(self._shards(self.run))
        arrays = {name: self._whole_precision(name, x) for name, x in first.items()}
        self._finite(arrays)
        if self.run.twice:
            self._call(self._shards(replace(self.run, seed=self.run.seed + 1)))
            for name, x in first.items():
                if self._differs(name, x, arrays[name]):
                    self.note("aliasing", f"{name} of the first call was changed by the second call")
            for name, x in self._call(self._shards(self.run)).items():
                if by := self._differs(name, x, arrays[name]):
                    self.note("determinism", f"{name} differs by {by} between two equal calls")
            if self.run.backward:
                self._two_layers(arrays)
        meters = (*self.meters, None, None)
        notes = list(dict.fromkeys(self.notes))
        if self._is_short:
            return RankResult(own[:-1], self.key_positions[:-1], arrays, notes)
        return RankResult(
            own, self.key_positions, arrays, notes, meters[0], meters[1], of_trained=self.of_trained
        )

    def _finite(self, arrays: dict[str, np.ndarray]) -> None:
        """Note results in rows of padding that are not finite."""
        padding = self.run.padded_tokens[:, self.positions[self.rank]]
        for name in arrays.keys() - {"lse"} if self.run.any_padding else ():
            rows = np.moveaxis(arrays[name], 1, 2)
            if not np.isfinite(rows[np.broadcast_to(padding, rows.shape[:2])]).all():
                self.note("padding", f"{name} is not finite in rows of padding, and spreads from there")

    def _halved(self, run: Run, rank: int, ring: Ring | None) -> tuple[Run, int, Ring | None]:
        """Return the run, the rank and the ring for one half of the ranks.

        The world then has two rings, or the process group is not the world.
        """
        every = [range(start, run.P, 2) for start in (0, 1)]
        if ring is not None:
            ring = Ring(SubGroup(ring.comm, every[rank % 2]))
        else:
            self.group = [torch.distributed.new_group(list(ranks)) for ranks in every][rank % 2]
        # Results are joined in rank order, so the odd ring's results replace the even ring's. The even ring
        # gets other inputs, by another seed.
        half = replace(run, P=run.P // 2, seed=run.seed + 1 - rank % 2)
        return half if rank % 2 or run.use != TWO_AT_ONCE else self._another(half), rank // 2, ring

    def _another(self, run: Run) -> Run:
        """Return the run with another mask and scale, as far as the target takes them."""
        causal = not run.causal if len({*self.target.causal}) > 1 else run.causal
        scale = 0.3 if run.scale is None else 0.7
        return replace(run, causal=causal, scale=scale if self.target.takes_scale else None)

    @property
    def _is_short(self) -> bool:
        """Return whether this rank's shard lacks its last token."""
        return self.run.fault == "wrong shape" and self.rank == 1

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let two rings over ringlab's Comm call one after the other, because both may be in one process.

        Virtual ranks with the same number in two rings would share the state that a module keeps for a rank.
        Processes share nothing.
        """
        world = self._world
        if world is None:
            yield
            return
        for turn in (0, 1):
            if world.rank % 2 == turn:
                yield
            world.barrier()

    @property
    def _world(self) -> Comm | None:
        """Return the transport of both rings if this part's ring is one of two, else None."""
        comm = self.ring.comm if self.ring is not None else None
        comm = comm.inner if isinstance(comm, Metered) else comm
        return comm.inner if isinstance(comm, SubGroup) else None

    def meet_all(self) -> None:
        """Wait for the other ranks of both rings."""
        if self._world is not None:
            self._world.barrier()

    def twins(self) -> list[RankPart]:
        """Return two parts of this rank over torch.distributed, with other inputs and process groups of their own."""
        found = []
        for shift in (0, 1):
            part = copy(self)
            part.run = self._another(replace(self.run, seed=self.run.seed + 1)) if shift else self.run
            part.group = torch.distributed.new_group()
            found.append(part)
        return found

    def shards(self, shift: int = 0) -> tuple[Tensor, ...]:
        """Return this rank's q, k, v and dout, drawn with the run's seed plus `shift`."""
        return self._shards(replace(self.run, seed=self.run.seed + shift))

    def own(self, whole: Float[Tensor, "B H S"]) -> Float[Tensor, "B H L"]:
        """Return this rank's rows of a tensor (B, H, S)."""
        return whole.index_select(-1, torch.from_numpy(self.positions[self.rank])).to(self.device)

    def own_of(self, whole: Float[Tensor, "B H S D"]) -> Float[Tensor, "..."]:
        """Return this rank's tokens of a whole tensor, in the target's order of axes."""
        own = whole[:, :, torch.from_numpy(self.positions[self.rank])].to(self.device)
        return as_axes(own, self.target.axes)

    def attend(
        self, qkv: tuple[Any, ...], metered: bool = False
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "B H L"] | None]:
        """Return the target's (out, lse) for these tensors. Raises: WrongResult for any other result.

        In a call that must fail, a tensor may be None.
        """
        known = {**self._known(), **self.target.packed(qkv)}
        self.begun += 1
        if self.run.meter:
            total = float(qkv[0].detach().double().sum())
            self.queries = total, total * qkv[0].shape[-1] ** -0.5
        positional, named = arguments(self.target.function, qkv, known)
        self.handed = {name: x for name, x in named.items() if not any(x is each for each in qkv)}
        with (
            unchanged({**dict(zip("qkv", qkv, strict=True)), **self.handed}, self._changed),
            self._pass() if metered else nullcontext(),
        ):
            answer = self.calls(positional, named)
            self.returned += 1
            out, lse = self._unpacked(answer)
        q, dims = qkv[0], self.run.dv or qkv[0].shape[-1]
        self._looks_like("out", out, q[..., :1].expand(*q.shape[:-1], dims))
        return out, lse

    def gradients(
        self,
        leaves: tuple[Float[Tensor, "..."], ...],
        dout: Float[Tensor, "..."],
        out: Float[Tensor, "..."],
        lse: Float[Tensor, "B H L"] | None,
        retain: bool = False,
    ) -> Any:
        """Return (dq, dk, dv) from the target; retain: whether autograd keeps the graph for another backward.

        Raises: WrongResult if the target returns anything else.
        """
        with unchanged({**dict(zip("qkv", leaves, strict=True)), "dout": dout, **self.handed}, self._changed):
            return self._gradients(leaves, dout, out, lse, retain)

    def _gradients(
        self,
        leaves: tuple[Float[Tensor, "..."], ...],
        dout: Float[Tensor, "..."],
        out: Float[Tensor, "..."],
        lse: Float[Tensor, "B H L"] | None,
        retain: bool,
    ) -> Any:
        if self.target.gradients is not None:
            known = {
                **self._known(),
                "dout": dout,
                "out": out.detach(),
                "lse": None if lse is None else lse.detach(),
            }
            gradients = call(self.target.gradients, tuple(x.detach() for x in leaves), known)
            if not isinstance(gradients, (tuple, list)) or len(gradients) != 3:
                raise WrongResult(f"gradients are (dq, dk, dv), got {_kind(gradients)}")
            return gradients
        if not out.requires_grad:
            raise WrongResult("out has no gradient: autograd cannot go back from it to q, k and v")
        trained = leaves if self.trained is None else (*leaves, self.trained)
        gradients = torch.autograd.grad(out, trained, dout, retain_graph=retain, allow_unused=True)
        if self.trained is not None:
            *gradients, found = gradients
            self.of_trained = None if found is None else oracle.float64(found)
        missing = [name for name, x in zip("qkv", gradients, strict=True) if x is None]
        if missing:
            raise WrongResult(f"out does not depend on {', '.join(missing)} for autograd")
        return gradients

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Let the calls in this context use one half of the ranks, as if this part belonged to the ring of this half.

        Raises: WrongResult for an error of the target's own layout.
        """
        group = self.group
        run, rank, ring = self._halved(self.run, self.rank, self.ring)
        self.group, half = group, self.group
        with self._as_part_of(run, rank, ring, half), self.turn():
            yield

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Let torch.compile trace the calls in this context, without code that was traced before."""
        function, kept = self.target.function, self.calls

        def traced(positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
            return function(*positional, **named)

        self.meet()
        torch._dynamo.reset()  # the limit of recompilations counts earlier targets and ranks too
        torch._dynamo.trace_rules.add("ringlab.comm")  # the transport is the suite's, not the target's
        self.meet()
        self.calls = torch.compile(traced, backend="aot_eager")
        try:
            yield
        finally:
            self.calls = kept

    @contextmanager
    def _as_part_of(self, run: Run, rank: int, ring: Ring | None, group: Any) -> Iterator[None]:
        """Let the calls in this context be those of another run, ring and group."""
        kept = self.__dict__.copy()
        self.run, self.rank, self.ring, self.group = run, rank, ring, group
        self._deal()
        try:
            yield
        finally:
            self.__dict__.update(kept)

    def asking(self, run: Run) -> AbstractContextManager[None]:
        """Let the calls in this context be those of another run on the same ranks."""
        return self._as_part_of(run, self.rank, self.ring, self.group)

    def with_other_arguments(self, layout: str) -> AbstractContextManager[None]:
        """Give the calls in this context other arguments and positions, whose tensors are changed in place later."""
        self.held, self.held_positions = {}, []
        return self.asking(replace(self.with_other_values, layout=layout))

    @property
    def other_layout(self) -> str:
        """Return a layout with other positions in shards of the same lengths, or the run's own if there is none.

        It is the run's own unless the target takes positions and no layout. If the target claims all layouts,
        it may be one of `ORDERS`, which the target may refuse.
        """
        run, lengths = self.run, [len(each) for each in self.positions]
        orders = ORDERS if {*layout_names()} <= {*self.target.layouts} else ()
        for layout in (*self.target.layouts, *orders) if self.target.told_positions_alone else ():
            dealt = self.target.positions(layout, run.S, run.P, run.with_padding)
            if layout != run.layout and [len(each) for each in dealt] == lengths:
                return layout
        return run.layout

    @property
    def with_other_values(self) -> Run:
        """Return the run with other values of the arguments that it passes, and another scale."""
        run = self.run
        return replace(
            run,
            seed=run.seed + 1,
            scale=self._another(run).scale,
            window=run.window and run.window + 2,
            sides=tuple(side if side < 0 else side + 1 for side in run.sides),
            softcap=2 * run.softcap,
            prefix=run.prefix and max(1, run.prefix - 2),
            alibi=run.alibi / 2,
            documents=run.documents if run.pads else run.documents[::-1],
            documents_of=run.documents_of[::-1],
            pads_of=run.pads_of[::-1],
            holes=run.holes[::-1],
            dropout_seed=run.dropout_seed + 1,
        )

    @property
    def without_arguments(self) -> Run:
        """Return a plain run of another length and, if the target claims one, of another layout, mask and dtype."""
        run, defaults = self.run, dict[str, Any]({field.name: field.default for field in fields(Run)})
        layout, dtype = (
            next((each for each in claimed if each != own), own)
            for claimed, own in ((self.target.layouts, run.layout), (self.target.dtypes, run.dtype))
        )
        changed: dict[str, Any] = {"layout": layout, "dtype": dtype, "S": run.S + 2 * run.P}
        return replace(self._another(run), **{name: defaults[name] for name in GIVEN}, **changed)

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum over the ranks of each of these numbers."""
        here = torch.tensor(numbers)
        if self.ring is not None:
            return [int(each) for each in self.ring.all_reduce(here)]
        torch.distributed.all_reduce(here)
        return here.tolist()

    def meet(self) -> None:
        """Wait for the other ranks."""
        if self.ring is None:
            torch.distributed.barrier()
        else:
            self.ring.barrier()

    @contextmanager
    def counted(self, strict: bool = False) -> Iterator[PassMeter]:
        """Count the messages and tensors of all calls inside the context with one meter.

        strict: whether receive buffers are first filled with NaN.
        """
        meter = PassMeter(self.rank, self.run.P, self.on_send, strict, self.queries, self.run.block_bytes)
        if self.metered is not None:
            self.metered.meter = meter
        try:
            with torch.autograd.set_multithreading_enabled(False), meter.watch():
                yield meter
        finally:
            if self.metered is not None:
                self.metered.meter = None

    def _two_layers(self, alone: dict[str, np.ndarray]) -> None:
        """Make two forwards, then their backwards in reverse order, as every model of two layers does."""
        layers = []
        for run in (self.run, replace(self.run, seed=self.run.seed + 1)):
            *qkv, dout = self._shards(run)
            leaves = tuple(x.requires_grad_() for x in qkv)
            layers.append((leaves, dout, *self.attend(leaves, metered=True)))
        found: Any = ()
        for leaves, dout, out, lse in reversed(layers):
            with self._pass():
                found = self.gradients(leaves, dout, out, lse)
        for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
            if by := self._differs(name, gradient, alone[name]):
                self.note("layers", f"{name} differs by {by} where a second forward came before it")

    def _shards(self, run: Run) -> tuple[Tensor, ...]:
        own, keys = self.positions[self.rank], self.key_positions
        if self._is_short:
            own, keys = own[:-1], keys[:-1]
        rows = (own, keys, keys, own)
        shards = [x[:, :, part].to(self.device) for x, part in zip(inputs(run), rows, strict=True)]
        shards = [as_axes(x, self.target.axes) for x in shards]
        return tuple(FORMS[run.strided](shards, self.target.axes.index("H")))

    def _call(self, shards: tuple[Tensor, ...]) -> Tensors:
        """Return the results of a forward, and of a backward if the run requires it, by name."""
        *qkv, dout = shards
        kept = [x.clone() for x in shards]
        leaves = tuple(x.requires_grad_(self.run.backward) for x in qkv)
        out, lse = self.attend(leaves, metered=True)
        found = {"out": out.detach(), **({} if lse is None else {"lse": lse.detach()})}
        returned = {name: x.clone() for name, x in found.items()}
        if self.run.backward:
            with self._pass():
                gradients = self.gradients(leaves, dout, out, lse)
            for name, gradient, like in zip(("dq", "dk", "dv"), gradients, qkv, strict=True):
                self._looks_like(name, gradient, like)
                found[name] = gradient
        for name, x, before in zip(("q", "k", "v", "dout"), shards, kept, strict=True):
            if not torch.equal(x.detach(), before):
                self.note("inputs", f"{name} was changed")
        self._aliases(found, dict(zip(("q", "k", "v", "dout"), shards, strict=True)))
        for name, x in returned.items():
            if by := self._differs(name, found[name], self._whole_precision(name, x)):
                self.note("aliasing", f"backward overwrites {name}, which the forward returned, by {by}")
                found[name] = x  # judge the values that forward returned by themselves
        return found

    def _known(self) -> dict[str, Any]:
        run, group = self.run, self.group
        if self.ring is None and group is None:
            group = torch.distributed.group.WORLD
        layout = self.target.known_layout(run.layout, run.S, run.P)
        more = dict(given(self.target, run, self.positions[self.rank], self.device))
        if names := TRAINED.get(run.trained):
            more |= (
                dict.fromkeys(SCALES, torch.tensor(run.scale, device=self.device)) if names == SCALES else {}
            )
            self.trained = more[names[0]].clone().requires_grad_()
            more |= dict.fromkeys(names, self.trained)
        # A mask says whether it is causal, and ringlab refuses a mask together with `causal`.
        masks = set() if "mask" in more else {"causal", "is_causal"}
        masks |= {"causal", "is_causal"} & self.target.required
        positions = tensors_of([each + run.offset for each in self.positions], self.device)
        if run.strided == "offset":
            positions, more = away_in(positions), {name: away_in(x) for name, x in more.items()}
        if self.held is not None:
            positions, more = self._held(positions), more | self._in_held_memory(more)
            self.trained = more[names[0]] if names else None
        return {
            "ring": self.ring, "comm": self.ring.comm if self.ring else None, **dict.fromkeys(GROUPS, group),
            "rank": self.rank, "world_size": run.P, **dict.fromkeys(masks, SPELLINGS[run.spelled](run.causal)),
            "layout": layout or run.layout, "positions": positions,
            "scale": run.scale, "softmax_scale": run.scale, "return_lse": True,
            **more, **self.target.options,
        }  # fmt: skip

    def _in_held_memory(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of `given`, copied into held tensors of the same shape and dtype; hold all others."""
        assert self.held is not None
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        for name, x in tensors.items():
            before = self.held.get(name)
            if before is not None and (before.shape, before.dtype) == (x.shape, x.dtype):
                before.data.copy_(x.detach())
            else:
                self.held[name] = x if x.is_contiguous() else x.clone()  # an expanded one cannot be filled
        return {name: self.held[name] for name in tensors}

    def _held(self, positions: list[Tensor]) -> list[Tensor]:
        """Return the held positions, filled with these values; if the lengths differ, hold these positions instead."""
        if [len(each) for each in self.held_positions] != [len(each) for each in positions]:
            self.held_positions[:] = positions
        for before, each in zip(self.held_positions, positions, strict=True):
            before.data.copy_(each)
        return self.held_positions

    def _unpacked(self, result: Any) -> tuple[Tensor, Tensor | None]:
        """Return (out, lse) from the target's value; lse is (B, H, L), or None if there is none."""
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if not parts or not isinstance(parts[0], Tensor):
            raise WrongResult(f"a tensor, or a tuple that begins with one, is needed; got {_kind(result)}")
        out: Tensor = parts[0]
        lse = parts[1] if len(parts) > 1 and isinstance(parts[1], Tensor) else None
        run, axes = self.run, self.target.axes
        if lse is not None and out.ndim == len(axes):
            length = out.shape[axes.index("L")]
            if lse.shape == (run.B, length, run.H) and length != run.H and axes != "BHLD":
                lse = lse.transpose(1, 2)
            elif lse.shape == (length, run.B, run.H) and axes == "LBHD":
                lse = lse.permute(1, 2, 0)
            elif lse.ndim == 2 and axes == "LHD":
                lse = (lse if lse.shape[0] == run.H else lse.T)[None]
            if lse.shape != (run.B, run.H, length):
                raise WrongResult(f"lse of shape {(run.B, run.H, length)} is needed, got {tuple(lse.shape)}")
        return out, lse

    def _looks_like(self, name: str, x: Any, like: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise WrongResult(f"{name} is {_kind(x)}, not a tensor")
        if x.shape != like.shape:
            raise WrongResult(f"{name} has shape {tuple(x.shape)}, needed {tuple(like.shape)}")
        if x.dtype != like.dtype:
            self.note("types", f"{name} is {x.dtype} for inputs of {like.dtype}")
        if x.device != like.device:
            self.note("types", f"{name} is on {x.device} for inputs on {like.device}")

    def _aliases(self, found: Tensors, given: Tensors) -> None:
        owners = [(name, x) for name, x in given.items() if x.numel()]
        for name, x in found.items():
            if not x.numel():
                continue
            owner = next((its for its, other in owners if _share_memory(x, other)), None)
            if owner is not None:
                self.note("aliasing", f"{name} lies in the memory of {owner}")
            else:
                owners.append((name, x))

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """Run one pass, forward or backward, in this context, metered if the run or a fault needs it."""
        run = self.run
        if not (run.meter or (self.ring is None and (run.strict or run.fault))):
            with torch.autograd.set_multithreading_enabled(False):
                yield
            return
        with self.counted(run.strict) as meter:
            yield
        self.meters.append(meter.report())

    def _whole_precision(self, name: str, x: Tensor) -> np.ndarray:
        return oracle.float64(x.detach() if name == "lse" else from_axes(x.detach(), self.target.axes)).copy()

    def _differs(self, name: str, x: Tensor, before: np.ndarray) -> str:
        """Return the size of a result's difference from an earlier result, or "" if they are equal."""
        now = self._whole_precision(name, x)
        if np.array_equal(now, before, equal_nan=True):
            return ""
        return f"{float(np.nanmax(np.abs(now - before), initial=0.0)):.2g}"

    def _changed(self, text: str) -> None:
        self.note("state", text)

    def note(self, kind: str, text: str) -> None:
        """Record an observation for the checks."""
        self.notes.append((kind, f"{text} (rank {self.rank}; {self.run})"))


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have a byte in common.

    Disjoint parts of one buffer have none, whether they are side by side or interleaved.
    """
    (begin, end), (other, last) = _span(a), _span(b)
    if not (begin < last and other < end):
        return False
    return bool(np.isin(_addresses(a), _addresses(b)).any())


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's bytes, and the address after the last one."""
    reach = sum((count - 1) * stride for count, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.itemsize


def _addresses(x: Tensor) -> np.ndarray:
    """Return the addresses of all bytes of a tensor's entries."""
    found = np.arange(x.data_ptr(), x.data_ptr() + x.itemsize)
    for count, stride in zip(x.shape, x.stride(), strict=True):
        found = np.add.outer(found, np.arange(count) * stride * x.itemsize).ravel()
    return found


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
