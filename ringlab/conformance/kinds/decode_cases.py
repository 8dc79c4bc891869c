"""Calls of a decode as data: the cache and the new tokens of each call, and its result."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.calls import around, unusual
from ringlab.conformance.kinds.memory import laid
from ringlab.conformance.run.arguments import window_and_softcap
from ringlab.conformance.run.run import Run, inputs, sinks_of, slopes_of
from ringlab.conformance.run.troubles import WrongResult
from ringlab.conformance.target.argument_names import ALIBI, PADDING, SINKS, SOFTCAPS, VALID, WINDOWS
from ringlab.conformance.target.calling import call, required
from ringlab.errors import BackendError, in_one_line
from ringlab.merge import state_dtype

UNCLEARED = {"10,000": 1e4, "NaN": math.nan}
"""The values of slots that hold no token.

10,000 is finite in every dtype, and far from every written value. Memory that nobody wrote may hold NaN, and 0
times NaN is NaN.
"""
SLOTS, PAGE = 5, 4
"""The numbers of unused slots on each rank of a cache that has some, and of slots in a page of a cache that must have pages."""
MISSING = (0.5, 1.0, 0.0, 1.0, 0.25)
"""By which share of `shorter` each of three sequences or more is shorter, over and over. No order of such a batch by length
is its own inverse, and neither the first sequence nor the last has an extreme length."""
LOCAL_LENGTHS = ("cache_seqlens", "local_seq_lens", "dcp_local_seq_lens")
TOTAL_LENGTHS = ("seq_lens", "sequence_lengths")
LENGTHS = ("length", "lengths", "positions", *LOCAL_LENGTHS)
"""The parameters that say which slots are in use."""
TABLES = ("block_table", "block_tables", "page_table", "page_tables")
NEW_KEYS, NEW_VALUES = ("k_new", "new_k", "new_keys"), ("v_new", "new_v", "new_values")
SCALES = ("scale", "softmax_scale")
GIVEN = {"q", "k", "v", *LENGTHS, *TOTAL_LENGTHS, *TABLES, *NEW_KEYS, *NEW_VALUES, *SCALES}
"""The parameters that a function may require."""
NAMES: dict[str, tuple[str, ...]] = {
    "window": WINDOWS, "softcap": SOFTCAPS, "sinks": SINKS, "alibi": ALIBI, "scale": SCALES, "dv": (), "padding": (*PADDING, *VALID),
    "shorter": (*LOCAL_LENGTHS, *TOTAL_LENGTHS), "paged": TABLES, "appended": (*NEW_KEYS, *NEW_VALUES), "rolled": ("positions",),
}  # fmt: skip
"""The fields of a case that a function may refuse, each with its parameters."""


@dataclass(frozen=True)
class Case:
    """One or more calls, each with the tokens at the end of B sequences, of S tokens after the last call.

    new: the number of new tokens of each call. The calls follow each other on the same cache, which grows.
    dealt: "in turn" or "in stretches". rolled: whether the slots of the tokens before the new ones are in random order, as if
    they had been used before. uncleared: the value in `UNCLEARED` of slots that hold no token; "" if there are none. shorter:
    by how many tokens the second of two sequences is shorter than the first; see `MISSING` for more sequences. paged: the
    number of slots in a page of a cache whose pages are in random order, or 0. appended: whether the function writes the keys
    and values of the new tokens. padding: the number of padding tokens before all sequences. drafted: whether a call with
    other new tokens comes first, as with drafts that are rejected, and their slots are written again. memory: how tensors
    lie in memory, a key of `ringlab.conformance.kinds.memory.LAID`. default: the default dtype of new tensors. inference: whether
    calls are made under inference_mode. beside: whether another call is made in a second thread, between a
    rank's result and the message with it. The other fields are those of a `Run`.
    """

    P: int
    S: int = 24
    new: tuple[int, ...] = (1,)
    dealt: str = "in turn"
    B: int = 2
    H: int = 2
    K: int = 2
    D: int = 16
    dtype: str = "float32"
    values: str = "normal"
    uncleared: str = ""
    shorter: int = 0
    paged: int = 0
    appended: bool = False
    rolled: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    scale: float | None = None
    dv: int = 0
    padding: int = 0
    drafted: bool = False
    memory: str = ""
    default: str = ""
    inference: bool = False
    beside: bool = False

    def __str__(self) -> str:
        return ", ".join([f"P={self.P}", *unusual(self, Case(self.P))])

    def run(self, seed: int) -> Run:
        """Return the run of the whole sequences, both of the same length."""
        same = ("B", "H", "K", "D", "dtype", "values", "window", "softcap", "sinks", "alibi", "scale", "dv")
        pads = (-self.padding,) if self.padding else ()
        more = {name: getattr(self, name) for name in same}
        return Run(1, self.S, "", True, pads=pads, seed=seed, **more)

    @property
    def missing(self) -> list[int]:
        """Return by how many tokens each sequence is shorter than S after the last call."""
        shares = (0.0, 1.0) if self.B < 3 else MISSING
        return [int(self.shorter * shares[sequence % len(shares)]) for sequence in range(self.B)]

    def tokens(self, rank: int) -> Int[np.ndarray, " L"]:
        """Return the tokens that a rank's slots hold after the last call."""
        tokens = np.arange(rank, self.S, self.P)
        if self.dealt != "in turn":
            tokens = np.array_split(np.arange(self.S), self.P)[rank]
        if self.rolled:
            old = tokens < self.S - max(self.missing) - sum(self.new)
            tokens[old] = np.random.default_rng([self.S, self.P, rank]).permutation(tokens[old])
        return tokens

    def ends(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of new tokens of each call, and the length of each sequence with them."""
        for n, left in zip(self.new, np.cumsum(self.new[::-1])[::-1], strict=True):
            yield n, [self.S - missing - int(left) + n for missing in self.missing]

    def rows(self, whole: Shaped[np.ndarray, "B H S ..."]) -> Shaped[np.ndarray, "B H n ..."]:
        """Return the new tokens' rows of an array over whole sequences, (B, H, S, …)."""
        n = sum(self.new)
        last = [whole.shape[2] - missing for missing in self.missing]
        return np.stack([x[:, end - n : end] for x, end in zip(whole, last, strict=True)])


@dataclass
class Result:
    """One rank's out of all calls, its lse if it returns one, and the names of inputs that a call changed."""

    out: Float[Tensor, "B H n Dv"]
    lse: Float[Tensor, "B H n"] | None
    changed: list[str]


class _Cache:
    """One rank's slots of the cache in pages; without `paged`, all slots of a sequence are one page.

    kept: k and v as they must be after a call.
    """

    def __init__(self, case: Case, rank: int, k: Tensor, v: Tensor, paged: int, seed: int) -> None:
        B, self.tokens = case.B, case.tokens(rank)
        self.whole = [x[:, :, torch.from_numpy(self.tokens)] for x in (k, v)]
        slots = len(self.tokens) + (SLOTS if case.uncleared else 0)
        pages = -(-max(1, slots) // paged) if paged else 1
        self.page = paged or slots
        order = np.arange(B * pages)
        if paged:  # one page belongs to no sequence
            order = np.random.default_rng([pages, seed]).permutation(B * pages + 1)[:-1]
        self.table = torch.from_numpy(order.reshape(B, pages)).int()
        shape = B * pages + bool(paged), k.shape[1], self.page
        self.k, self.v = (
            x.new_full((*shape, x.shape[3]), UNCLEARED[case.uncleared or "10,000"]) for x in self.whole
        )
        if case.memory != "expanded":  # a cache that is written must not have two slots in one place
            self.k, self.v = laid(self.k, case.memory), laid(self.v, case.memory)
        self.kept = self.k.clone(), self.v.clone()

    def used(self, ends: Sequence[int]) -> list[int]:
        """Return the number of slots that sequences of these lengths use."""
        return [int((self.tokens < end).sum()) for end in ends]

    def write(
        self, pools: Iterable[Tensor], begin: Sequence[int], end: Sequence[int], drafted: bool = False
    ) -> None:
        """Write the values of slots of each sequence, from `begin` to `end`, into `pools`; drafted: wrong values."""
        for pool, right in zip(pools, self.whole, strict=True):
            x = 2.0 - right if drafted else right
            for sequence in range(len(begin)):
                slots = torch.arange(begin[sequence], end[sequence])
                if len(slots):
                    pages = self.table[sequence, slots // self.page].long()
                    pool[pages, :, slots % self.page] = x[sequence][:, slots].transpose(0, 1)


def result(function: Callable[..., Any], case: Case, ring: Ring | None, rank: int, seed: int) -> Result:
    """Return this rank's results of a case. Raises: the function's error; WrongResult if one is invalid."""
    needs, run = required(function), case.run(seed)
    paged = case.paged or (0 if needs.isdisjoint(TABLES) else PAGE)
    appended = case.appended or not needs.isdisjoint((*NEW_KEYS, *NEW_VALUES))
    q, k, v, _ = inputs(run)

    def made(given: dict[str, Any]) -> Any:
        with torch.inference_mode() if case.inference else nullcontext():
            return call(function, (), {**given, **around(ring, rank, case.P)})

    cache = _Cache(case, rank, k, v, paged, seed)
    held, found = [0] * case.B, list[Result]()
    for n, ends in case.ends():
        used = cache.used(ends)
        ready = cache.used([end - n for end in ends]) if appended else used
        cache.write((cache.k, cache.v), held, ready)
        cache.write(cache.kept, held, used)
        held = used
        rows, keys, values = (
            torch.stack([x[sequence, :, end - n : end] for sequence, end in enumerate(ends)])
            for x in (q, k, v)
        )
        given: dict[str, Any] = {"q": rows, "k": cache.k, "v": cache.v}
        given |= _lengths(case, cache, ends) | _arguments(case, run, cache)
        given |= dict.fromkeys(TABLES, cache.table.clone()) if paged else {}
        given |= dict.fromkeys(NEW_KEYS, keys) | dict.fromkeys(NEW_VALUES, values) if appended else {}
        given |= {
            name: laid(x, case.memory)
            for name, x in given.items()
            if name not in "kv" and isinstance(x, Tensor)
        }
        if case.drafted:
            before = cache.used([end - n for end in ends])
            cache.write((cache.k, cache.v), before, used, drafted=True)
            made(given)
            cache.write((cache.k, cache.v), before, used)
        kept = copy.deepcopy(given) | dict(zip("kv", cache.kept, strict=True))
        returned = made(given)
        found.append(_result(returned, rows, values))
        found[-1].changed += [name for name, x in given.items() if not _same(x, kept[name])]
    out = torch.cat([each.out for each in found], dim=2)
    lses = [each.lse for each in found if each.lse is not None]
    lse = torch.cat(lses, dim=2) if len(lses) == len(found) else None
    return Result(out, lse, [name for each in found for name in each.changed])


def _lengths(case: Case, cache: _Cache, ends: Sequence[int]) -> dict[str, Any]:
    used, longest = cache.used(ends), max(ends)
    given: dict[str, Any] = {
        "length": max(used),
        "lengths": [int((case.tokens(rank) < longest).sum()) for rank in range(case.P)],
        "positions": torch.from_numpy(cache.tokens[: max(used)].copy()),
    }
    given |= dict.fromkeys(LOCAL_LENGTHS, torch.tensor(used, dtype=torch.int32))
    return given | dict.fromkeys(TOTAL_LENGTHS, torch.tensor(ends, dtype=torch.int32))


def _arguments(case: Case, run: Run, cache: _Cache) -> dict[str, Any]:
    scale = case.D**-0.5 if run.scale is None else run.scale
    given = {**window_and_softcap(run), **dict.fromkeys(SCALES, scale)}
    given |= dict.fromkeys(SINKS, sinks_of(run)) if run.sinks else {}
    given |= dict.fromkeys(ALIBI, slopes_of(run)) if run.alibi else {}
    if run.pads:
        slots = cache.table.shape[1] * cache.page
        padding = np.ones(slots, bool)
        padding[: len(cache.tokens)] = run.padding[cache.tokens]
        mask = torch.from_numpy(padding).expand(case.B, -1)
        given |= {**dict.fromkeys(PADDING, mask), **dict.fromkeys(VALID, (~mask).long())}
    return given


def _result(returned: Any, rows: Tensor, values: Tensor) -> Result:
    """Return what a call returned. Raises: WrongResult unless it is out, or out and lse, in the right form."""
    out, lse, *_ = (*returned, None) if isinstance(returned, (tuple, list)) and returned else (returned, None)
    wanted = {"out": (out, (*rows.shape[:3], values.shape[3]), rows.dtype)}
    wanted |= {} if lse is None else {"lse": (lse, (*rows.shape[:3],), state_dtype(rows.dtype))}
    for name, (x, shape, dtype) in wanted.items():
        if not isinstance(x, Tensor) or (tuple(x.shape), x.dtype) != (shape, dtype):
            got = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise WrongResult(in_one_line(BackendError(f"{name} as a tensor {shape} of {dtype}", got)))
    # A later call may write into the same memory.
    return Result(out.detach().clone(), None if lse is None else lse.detach().clone(), [])


def _same(x: Any, kept: Any) -> bool:
    if not isinstance(x, Tensor):
        return bool(x == kept)
    return x.shape == kept.shape and torch.allclose(x, kept, rtol=0.0, atol=0.0, equal_nan=True)


def names(case: Case) -> set[str]:
    """Return the names of the arguments to which a case gives values of its own."""
    own = {name for field in arguments_of(case) for name in NAMES[field]}
    return {"q", "k", "v", *LENGTHS, *TOTAL_LENGTHS} | own


def arguments_of(case: Case) -> list[str]:
    """Return the fields of `NAMES` that a case sets."""
    return [field for field in NAMES if getattr(case, field) != getattr(Case, field)]
