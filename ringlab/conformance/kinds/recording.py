"""Records what each module of a model takes and returns on one rank, and the gradients of its outputs.

torch's global hooks see every call of every module, so no module has to be changed. `ringlab.conformance.kinds.layers`
compares recordings.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ringlab.conformance.kinds.step_cases import (
    IGNORE,
    OPTIONS,
    VOCABULARY,
    Case,
    packed,
)
from ringlab.errors import BackendError
from ringlab.layout import get_layout

STEP = "the step"
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch's wrappers put around a module; DistributedDataParallel is unwrapped by its class."""


class Key(NamedTuple):
    """A tensor of a module's call number `call`, from 1. what: "input x", "output" or "output.logits"."""

    module: str
    call: int
    what: str

    def __str__(self) -> str:
        what = self.what.replace("input ", "argument ", 1) if self.what.startswith("input ") else self.what
        the = "" if self.module == STEP else "the "
        return f"{the}{what} of {self.module}" + (f", in call {self.call}," if self.call > 1 else "")


@dataclass
class Recording:
    """The tensors that one rank's modules took and returned, in the order of execution, on the CPU.

    positions: the place of each of this rank's tokens in the whole sequence, −1 for padding; None if no
    module took token ids. found_in: the module that took them. weights: parameters and buffers before the
    first call. settings: class, numbers, words and flags of each module. parents: the module that called
    each module. error: the error that ended the run, or "". at: the module that was running then.
    """

    positions: Int[np.ndarray, " L"] | None = None
    found_in: str = ""
    values: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    weight_gradients: dict[str, Tensor] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    error: str = ""
    at: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first parameter that has a floating dtype."""
        return next((x.dtype for x in self.weights.values() if x.is_floating_point()), torch.float32)

    @property
    def tokens(self) -> list[int]:
        """Return the positions as a list; an empty one if they are unknown."""
        return [] if self.positions is None else self.positions.tolist()

    @property
    def calls(self) -> Counter[str]:
        """Return how many calls each module had."""
        return Counter({key.module: key.call for key in self.values})


@dataclass(frozen=True)
class Plan:
    """The call that every run makes. documents: the lengths of packed documents, for which B = 1."""

    P: int
    S: int
    documents: tuple[int, ...] = ()
    layout: str = ""
    seed: int = 0

    @property
    def rows(self) -> int:
        """Return the number of sequences, B."""
        return 1 if self.documents else 2

    @property
    def ids(self) -> int:
        """Return the number of token ids: VOCABULARY, or more if S different columns need more."""
        root = math.isqrt(self.S)
        of_pairs = (
            root + 1 + (self.S > root * (root + 1))
        )  # so many ids form at least S ordered pairs, one for each column of two rows
        return max(VOCABULARY, self.S if self.documents else of_pairs)

    def tokens(self) -> Int[Tensor, "B S"]:
        """Return token ids below `ids`. No two columns are equal, and a column's two ids differ."""
        draw, ids = np.random.default_rng([self.S, self.seed]), self.ids
        if self.documents:
            return torch.from_numpy(draw.permutation(ids)[: self.S])[None]
        first, second = np.divmod(draw.permutation(ids * (ids - 1))[: self.S], ids - 1)
        return torch.from_numpy(np.stack([first, second + (second >= first)]))

    def given(self) -> dict[str, Any]:
        """Return the arguments of the step by name, besides those of `around`."""
        tokens = self.tokens()
        labels = tokens.clone()
        labels[:, [0, *accumulate(self.documents)][: len(self.documents)]] = IGNORE
        options = {name: getattr(Case(self.P), option) for option, names in OPTIONS.items() for name in names}
        documents = packed(self.documents) if self.documents else {}
        return {"tokens": tokens, "input_ids": tokens.clone(), "labels": labels, **documents, **options}

    def place(self, token: int) -> str:
        """Return a token in words: its number in the sequence, with its document if documents are packed."""
        ends = [*accumulate(self.documents)]
        if not ends:
            return f"token {token}"
        document = next(i for i, end in enumerate(ends) if token < end)
        return f"token {token} (position {token - ([0, *ends][document])} of document {document})"


class _In(TorchFunctionMode):
    """A mode in which, once it is `active`, code that asks for any floating dtype gets `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.active = dtype, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a function of torch."""
        kwargs = kwargs or {}
        if not self.active or function is Tensor.view:  # a view of bytes as numbers is not a conversion
            return function(*args, **kwargs)
        if function in (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16):
            return args[0].to(self.dtype)
        if function is torch._grouped_mm and self.dtype == torch.float64:
            return _grouped(*args, **kwargs)
        return function(*map(self._own, args), **{name: self._own(x) for name, x in kwargs.items()})

    def _own(self, x: Any) -> Any:
        return self.dtype if isinstance(x, torch.dtype) and x.is_floating_point else x


def _grouped(
    x: Shaped[Tensor, "..."], weight: Shaped[Tensor, "..."], offs: Int[Tensor, " G"] | None = None, **_: Any
) -> Shaped[Tensor, "..."]:
    """Return torch._grouped_mm of rows that are sorted by expert, in dtypes that it refuses."""
    if offs is None or x.ndim != 2 or weight.ndim != 3:
        return torch.bmm(x, weight)
    ends = offs.tolist()
    rows = [x[start:end] @ each for start, end, each in zip([0, *ends], ends, weight, strict=False)]
    return torch.cat([*rows, x.new_zeros(len(x) - ends[-1], weight.shape[-1])])


class _InReverse(TorchFunctionMode):
    """A mode in which products of matrices, and those of their gradients, add up their terms in reverse order."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a function of torch."""
        if kwargs or len(args) < 2 or not all(isinstance(x, Tensor) and x.ndim > 1 for x in args[:2]):
            return function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear:
            bias = [None if x is None else x.flip(0) for x in args[2:]]
            return function(args[0].flip(-2, -1), args[1].flip(0, 1), *bias).flip(-2, -1)
        if function in (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__):
            return function(*(x.flip(-2, -1) for x in args)).flip(-2, -1)
        return function(*args)


class _Replaced(torch.autograd.Function):
    """Other values for a tensor, with the tensor's own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return other.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Place(NamedTuple):
    """The axis of a tensor's tokens. rows: B if the axis holds the tokens of one row after the other, else 0."""

    axis: int
    rows: int

    def tokens(
        self, x: Shaped[Tensor, "..."], index: Int[Tensor, " L"] | None = None
    ) -> Shaped[Tensor, "..."]:
        """Return `x` with its tokens on the first axis: those at `index`, or all of them."""
        x = (x.unflatten(self.axis, (self.rows, -1)) if self.rows else x).movedim(
            self.axis + bool(self.rows), 0
        )
        return x if index is None else x[index.to(x.device)]

    def back(self, tokens: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Undo `tokens`: return the tensor with its tokens on their own axis."""
        x = tokens.movedim(0, self.axis + bool(self.rows))
        return x.flatten(self.axis, self.axis + 1) if self.rows else x


def place_of(
    whole: Shaped[Tensor, "..."], part: Shaped[Tensor, "..."], sizes: tuple[int, int], rows: int
) -> Place | None:
    """Return the axis that has sizes[0] tokens in `whole` and sizes[1] in `part`, or None if there is none.

    All other axes must be equal. Axis 1 is preferred, which matters only if a rank has all tokens.
    """
    if whole.ndim != part.ndim:
        return None
    found = []
    for axis, pair in enumerate(zip(whole.shape, part.shape, strict=True)):
        if whole.shape[:axis] + whole.shape[axis + 1 :] != part.shape[:axis] + part.shape[axis + 1 :]:
            continue
        if pair == sizes:
            found.append(Place(axis, 0))
        elif pair == (rows * sizes[0], rows * sizes[1]):
            found.append(Place(axis, rows))
    return next((each for each in found if each.axis == 1), found[0] if found else None)


_CURRENT: ContextVar[Any] = ContextVar("ringlab.layers")


class Recorder:
    """Records one rank's run.

    dtype: the dtype in which the run computes, if not the step's own. truth: the recording whose values
    replace the modules' outputs, if any. in_reverse: whether products add up their terms in reverse order.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        dtype: torch.dtype | None,
        truth: Recording | None,
        in_reverse: bool = False,
    ) -> None:
        self.plan, self.truth = plan, truth
        self.summing = _InReverse() if in_reverse else nullcontext()
        self.mode = None if dtype is None else _In(dtype)
        self.found = Recording()
        self.names: dict[int, str] = {}
        self.roots: list[tuple[str, nn.Module]] = []
        self.running: list[tuple[str, int, int]] = []
        self.counts, self.again = Counter[str](), Counter[str]()
        self.order: dict[Key, int] = {}
        self.index: Tensor | None = None
        columns = self.plan.tokens().T.tolist()
        self.columns = {tuple(column): token for token, column in enumerate(columns)}
        if plan.layout:
            self.found.positions = get_layout(plan.layout, plan.S, plan.P).positions(rank)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the modules that this thread calls inside the block."""
        token = _CURRENT.set(self)
        handles = (
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True),
        )
        try:
            with self.summing, self.mode or nullcontext():
                yield
        except BaseException:
            self.found.at = self.running[-1][0] if self.running else ""
            raise
        finally:
            for handle in handles:
                handle.remove()
            _CURRENT.reset(token)
            for name in ("values", "gradients"):
                found = getattr(self.found, name)
                setattr(self.found, name, dict(sorted(found.items(), key=lambda item: self.order[item[0]])))

    def ends(self, returned: Any) -> None:
        """Record what the step returned, and the gradients of weights."""
        loss, held = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1):
            dtype = loss.dtype if isinstance(loss, Tensor) and loss.is_floating_point() else self.found.dtype
            self._record(Key(STEP, 1, "the loss"), torch.tensor(float(loss), dtype=dtype))
        weights = {
            prefix + _clean(name): weight.grad
            for prefix, root in self.roots
            for name, weight in root.named_parameters()
        }
        given = held if isinstance(held, Mapping) else weights
        kept = {
            name: _kept(x)
            for name, x in given.items()
            if isinstance(x, Tensor) and not hasattr(x, "to_local")
        }
        self.found.weight_gradients = kept

    def _mine(self) -> bool:
        return _CURRENT.get(None) is self

    def _before(self, module: nn.Module, args: Any) -> Any:
        if not self._mine() or _in_backward():
            return None
        if not self.running:
            args = self._begins(module, args)
        name = self._name(module)
        self.counts[name] += 1
        self.found.parents.setdefault(name, self.running[-1][0] if self.running else "")
        self.found.settings.setdefault(name, _settings(module))
        self.running.append((name, self.counts[name], self._tick()))
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            remedy = "call model.eval(), or set the probability in the model's config to 0"
            raise BackendError(
                "a model without dropout, which would drop other entries on each rank",
                f"{name}, p={module.p}",
                remedy,
            )
        self._locate(name, _inputs(module, args, {}))
        return args

    def _begins(self, root: nn.Module, args: Any) -> Any:
        """Take the names and weights of a module that no other module has called, and set its dtype."""
        if type(root).__name__ == "DistributedDataParallel":
            self.names[id(root)] = "DistributedDataParallel"
            root = next(root.children())
        if id(root) not in self.names:
            kind = type(root).__name__
            same = sum(type(each) is type(root) for _, each in self.roots)
            own = f"{kind}#{same + 1}" if same else kind
            prefix = f"{own}." if self.roots else ""
            self.roots.append((prefix, root))
            for name, module in root.named_modules():
                self.names.setdefault(id(module), prefix + _clean(name) if _clean(name) else own)
            for name, weight in (*root.named_parameters(), *root.named_buffers()):
                if not hasattr(weight, "to_local"):  # a shard of torch's FSDP
                    self.found.weights[prefix + _clean(name)] = _kept(weight)
        if self.mode is None:
            return args
        dtype = self.mode.dtype
        self.mode.active = True
        torch.set_default_dtype(dtype)
        root.to(dtype)
        return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    def _name(self, module: nn.Module) -> str:
        known = self.names.get(id(module))
        return known or ".".join([*(name for name, *_ in self.running[-1:]), type(module).__name__])

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._mine():
            return None
        if _in_backward():
            return self._recomputed(module, output)
        name, count, begun = self.running.pop()
        while name != self._name(module) and self.running:  # a module in it raised an error that was caught
            name, count, begun = self.running.pop()
        inputs = _inputs(module, args, kwargs)
        self._locate(name, inputs)

        def taken(path: str, x: Tensor) -> Tensor:
            return self._record(Key(name, count, path.removeprefix(".")), x, begun)

        def given(path: str, x: Tensor) -> Tensor:
            key = Key(name, count, f"output{path}")
            self._record(key, x)
            x = self._replaced(key, x)
            if x.requires_grad:
                x.register_hook(lambda gradient: self._gradient(key, gradient))
            return x

        _mapped({f"input {argument}": value for argument, value in inputs.items()}, taken)
        return _mapped(output, given)

    def _recomputed(self, module: nn.Module, output: Any) -> Any:
        """Replace the outputs of a module that a checkpoint calls again, the last of several calls first."""
        name = self._name(module)
        count = self.counts[name] - self.again[name]
        self.again[name] += 1
        return _mapped(output, lambda path, x: self._replaced(Key(name, count, f"output{path}"), x))

    def _tick(self) -> int:
        self.counts[""] += 1
        return self.counts[""]

    def _record(self, key: Key, x: Tensor, at: int | None = None) -> Tensor:
        self.found.values[key] = _kept(x)
        self.order[key] = self._tick() if at is None else at
        return x

    def _gradient(self, key: Key, gradient: Tensor) -> None:
        before = self.found.gradients.get(key)
        self.found.gradients[key] = _kept(gradient) if before is None else before + _kept(gradient)

    def _replaced(self, key: Key, x: Tensor) -> Tensor:
        """Return a tensor with the truth's values and x's gradient; `x` if its tokens cannot be matched."""
        whole = self.truth.values.get(key) if self.truth is not None else None
        if self.truth is None or whole is None or whole.is_floating_point() != x.is_floating_point():
            return x
        if self.index is None:
            self.index = index_of(self.truth, self.found)
        if (index := self.index) is None:
            return x
        place = place_of(whole, x, (len(self.truth.tokens), len(index)), self.plan.rows)
        if place is None:
            return x
        tokens = place.tokens(whole, index.clamp(min=0)).to(x)
        own = place.tokens(x.detach())
        padding = (index < 0).to(x.device).view(-1, *[1] * (own.ndim - 1))
        other = place.back(torch.where(padding, own, tokens))
        return _Replaced.apply(x, other) if x.requires_grad else other

    def _locate(self, name: str, inputs: Mapping[str, Any]) -> None:
        """Find this rank's tokens, once, by the columns of token ids in the inputs of a module."""
        for argument, x in inputs.items() if self.found.positions is None else ():
            if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
                continue
            x = x[None] if x.ndim == 1 else x
            if x.ndim != 2 or len(x) != self.plan.rows or any(each in argument for each in _NO_TOKENS):
                continue
            places = np.array([self.columns.get(tuple(column), -1) for column in x.T.tolist()], np.int64)
            if 2 * (places >= 0).sum() > len(places):
                self.found.positions, self.found.found_in = places, name
                return


_NO_TOKENS = ("label", "target", "position", "seq", "mask", "segment", "document")
"""Parts of names of integer arguments that are not token ids."""


def same(x: Shaped[Tensor, "..."], y: Shaped[Tensor, "..."] | None) -> bool:
    """Return whether two tensors are equal bit by bit; a NaN equals another."""
    if y is None or x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _kept(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


def _settings(module: nn.Module) -> dict[str, Any]:
    simple = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and k[0] != "_"}
    return {"class": type(module).__name__, **simple}


def _inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by the names that its forward gives them."""
    try:
        there = inspect.signature(module.forward).parameters.values()
        names = [
            each.name for each in there if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    names += [str(i) for i in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _mapped(x: Any, function: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return `x` with function(path, tensor) in the place of each tensor in tuples, lists and mappings."""
    if isinstance(x, Tensor):
        return function(path, x)
    if isinstance(x, Mapping):
        new = {key: _mapped(value, function, f"{path}.{key}") for key, value in x.items()}
        changed = {key: value for key, value in new.items() if value is not x[key]}
        x = copy.copy(x) if changed else x
        for key, value in changed.items():
            x[key] = value
        return x
    if isinstance(x, (tuple, list)):
        parts = [_mapped(value, function, f"{path}[{index}]") for index, value in enumerate(x)]
        if all(new is old for new, old in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def index_of(truth: Recording, part: Recording) -> Int[Tensor, " L"] | None:
    """Return the index in the truth of each token of a rank, −1 for padding; None if the tokens are unknown."""
    if part.positions is None:
        return None
    known = {token: place for place, token in enumerate(truth.tokens)}
    return torch.tensor([known.get(token, -1) for token in part.positions.tolist()], dtype=torch.int64)
