"""Calls of a decode as data: the cache and the new tokens of each call, and its result."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.calls import around, unusual
from ringlab.conformance.kinds.memory import laid
from ringlab.conformance.kinds.page_lives import (
    COUNTED,
    LISTED,
    LIVES,
    SEQUENCES,
    Call,
    Growth,
    Pages,
    called_rows,
    with_common_tokens,
)
from ringlab.conformance.run.arguments import window_and_softcap
from ringlab.conformance.run.meters import Metered, PassMeter
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
"""The number of unused slots on each rank, if a cache has unused slots; and the number of slots in a page, if
the function requires pages."""
HUGE = 1 << 20
"""The number of pages above which only pages of sequences are compared."""
MISSING = (0.5, 1.0, 0.0, 1.0, 0.25)
"""The share of `shorter` by which each of three or more sequences is shorter, repeated for larger batches. No
permutation that sorts such a batch by length is its own inverse, and neither the first nor the last sequence
has an extreme length."""
LOCAL_LENGTHS = ("cache_seqlens", "local_seq_lens", "dcp_local_seq_lens")
TOTAL_LENGTHS = ("seq_lens", "sequence_lengths")
LENGTHS = ("length", "lengths", "positions", *LOCAL_LENGTHS)
"""The parameters that say which slots are in use."""
TABLES = ("block_table", "block_tables", "page_table", "page_tables")
NEW_KEYS, NEW_VALUES = ("k_new", "new_k", "new_keys"), ("v_new", "new_v", "new_values")
COPIES = ("blocks_to_copy", "pages_to_copy", "block_mapping")
COUNTS, FREE = ("ref_counts", "reference_counts"), ("free_pages", "free_blocks")
SCALES = ("scale", "softmax_scale")
GIVEN = {
    "q", "k", "v", *LENGTHS, *TOTAL_LENGTHS, *TABLES, *NEW_KEYS, *NEW_VALUES, *COPIES, *COUNTS, *FREE, *SCALES,
}  # fmt: skip
"""The parameters that a function may require."""
NAMES: dict[str, tuple[str, ...]] = {
    "window": WINDOWS, "softcap": SOFTCAPS, "sinks": SINKS, "alibi": ALIBI, "scale": SCALES, "dv": (), "padding": (*PADDING, *VALID),
    "shorter": (*LOCAL_LENGTHS, *TOTAL_LENGTHS), "empty": (*LOCAL_LENGTHS, *TOTAL_LENGTHS), "paged": TABLES, "appended": (*NEW_KEYS, *NEW_VALUES), "rolled": ("positions",),
}  # fmt: skip
"""The fields of a case that a function may refuse, each with its parameters."""


@dataclass(frozen=True)
class Case:
    """One or more successive calls on the same cache, each with the last tokens of B sequences.

    Tokens. S: the tokens of a sequence after the last call. new: the number of new tokens of each call.
    shorter: by how many tokens the second of two sequences is shorter than the first; see `MISSING` for more
    sequences. empty: whether the second sequence has no token, as in a batch that is filled up; its result is
    not compared. padding: the number of padding tokens before all sequences. drafted: whether a call with other
    new tokens comes first, as with rejected drafts, after which their slots are written again.

    Slots. dealt: how tokens are distributed to the ranks, "in turn" or "in stretches". rolled: whether the
    slots of the tokens before the new ones are in random order, as if they had been used before. uncleared: the
    value in `UNCLEARED` of slots without a token; "" if there are no such slots. appended: whether the function
    writes the keys and values of the new tokens.

    Pages. paged: the number of slots in a page of a cache whose pages are in random order, or 0. pool: the
    number of all pages, or 0 for no more than the sequences need; the sequences have the last page and those
    next to powers of two. rows: "of the longest" if every row of the table is a copy of the first row; all
    sequences then have the tokens of the first one, and shorter ones are cut back. life: a name in `LIVES`;
    several sequences then share, copy and exchange pages, and each of them gets new[0] tokens in a call.
    common: the number of tokens that its forks share. copied: who copies a shared page before it is written to,
    see `BY_CALLER`.

    Calls. memory: how tensors lie in memory, a key of `ringlab.conformance.kinds.memory.LAID`. default: the
    default dtype of new tensors. inference: whether calls are made under inference_mode. beside: whether each
    rank makes another call in a second thread, just before its first message and just after it. world: "of two
    groups" if the even and the odd ranks make the calls at the same time, each in a process group of their own
    and with inputs of their own. metered: whether the bytes that a rank sends are counted. The other fields are
    those of a `Run`.
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
    empty: bool = False
    paged: int = 0
    pool: int = 0
    rows: str = ""
    appended: bool = False
    life: str = ""
    common: int = 0
    copied: str = ""
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
    world: str = ""
    metered: bool = False

    def __str__(self) -> str:
        return ", ".join([f"P={self.P}", *unusual(self, Case(self.P))])

    def run(self, seed: int) -> Run:
        """Return the run of the whole sequences, all of the same length."""
        same = ("B", "H", "K", "D", "dtype", "values", "window", "softcap", "sinks", "alibi", "scale", "dv")
        pads = (-self.padding,) if self.padding else ()
        more = {name: getattr(self, name) for name in same}
        more |= {"B": SEQUENCES} if self.life else {}
        return Run(1, self.S, "", True, pads=pads, seed=seed, **more)

    @property
    def missing(self) -> list[int]:
        """Return by how many tokens each sequence is shorter than S after the last call."""
        shares = (0.0, 1.0) if self.B < 3 else MISSING
        missing = [int(self.shorter * shares[sequence % len(shares)]) for sequence in range(self.B)]
        return [self.S if sequence in self.empty_sequences else it for sequence, it in enumerate(missing)]

    @property
    def empty_sequences(self) -> list[int]:
        """Return the sequences without a token."""
        return [1] if self.empty else []

    def group_of(self, rank: int) -> list[int]:
        """Return the ranks that make the calls together with this one."""
        return [*range(rank % 2, self.P, 2)] if self.world else [*range(self.P)]

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
        """For each call, yield the number of new tokens and the length of each sequence including them."""
        for n, left in zip(self.new, np.cumsum(self.new[::-1])[::-1], strict=True):
            yield n, [max(0, self.S - missing - int(left) + n) for missing in self.missing]

    def last_rows(self) -> list[Int[np.ndarray, " n"]]:
        """Return the positions of the n new tokens of each sequence; the first n positions if it has fewer tokens."""
        n = sum(self.new)
        return [np.arange(n) + max(0, self.S - missing - n) for missing in self.missing]

    def new_rows(
        self, found: Shaped[np.ndarray, "B H rows ..."], at: Int[np.ndarray, " rows"]
    ) -> Shaped[np.ndarray, "B H n ..."]:
        """Return the rows of the new tokens; `found` has the rows `at` of all sequences.

        The rows of all calls of a life are those of one sequence.
        """
        n = sum(self.new)
        if self.life:
            called = called_rows(self.life, self.common, n)
            rows = [found[row.sequence][:, row.end - n : row.end] for row in called]
            return np.concatenate(rows, axis=1)[None]
        return np.stack(
            [x[:, np.searchsorted(at, rows)] for x, rows in zip(found, self.last_rows(), strict=True)]
        )

    def place(self, at: Sequence[int]) -> str:
        """Return the place of an entry of `new_rows` in words."""
        sequence, head, query = at[:3]
        if not self.life:
            return f"batch {sequence}, head {head}, query {query}"
        row = [*called_rows(self.life, self.common, self.new[0])][query // self.new[0]]
        where = f"call {row.call}, sequence {'ABCDE'[row.sequence]} of {row.end} tokens"
        return f"{where}, head {head}, query {query % self.new[0]}"

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and dout of the whole sequences."""
        q, k, v, dout = inputs(self.run(seed))
        if self.life:
            k, v = (with_common_tokens(self.life, self.common, self.new[0], x) for x in (k, v))
        if self.rows:
            k, v = (x[:1].expand_as(x).clone() for x in (k, v))
        return q, k, v, dout


@dataclass
class Result:
    """One rank's out of all calls, its lse if it returns one, and the names of inputs that a call changed.

    sent: the bytes that the rank sent in all calls of a metered case, without messages of a few integers.
    """

    out: Float[Tensor, "B H n Dv"]
    lse: Float[Tensor, "B H n"] | None
    changed: list[str]
    sent: int = 0


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
        # Of a cache in pages, at least one page belongs to no sequence.
        number = max(case.pool, B * pages + 1) if paged else B
        order = np.arange(B * pages)
        if paged:
            numbers = _far_pages(number)[: B * pages] if case.pool else np.arange(B * pages + 1)
            order = np.random.default_rng([pages, seed]).permutation(numbers)[: B * pages]
        table = order.reshape(B, pages)
        if paged and case.rows:
            table = np.repeat(table[:1], B, axis=0)
        self.owned = torch.from_numpy(table.flatten())
        if paged and not case.rows:  # servers do not clear the entries behind a sequence's end
            longest = int(np.argmin(case.missing))
            for row, missing in zip(table, case.missing, strict=True):
                behind = -(-int((self.tokens < case.S - missing).sum()) // self.page)
                row[behind:] = table[longest, behind:]
        self.table = torch.from_numpy(table).int()
        shape = number, k.shape[1], self.page
        value = UNCLEARED[case.uncleared or "10,000"]
        self.k, self.v, *self.kept = (
            _uncleared((*shape, x.shape[3]), x.dtype, value) for x in (*self.whole, *self.whole)
        )
        if case.memory != "expanded":  # a cache that is written must not have two slots in one place
            self.k, self.v = laid(self.k, case.memory), laid(self.v, case.memory)
        self.compared = self.table.unique().long() if number > HUGE else slice(None)

    def used(self, ends: Sequence[int]) -> list[int]:
        """Return the number of slots that sequences of these lengths use."""
        return [int((self.tokens < end).sum()) for end in ends]

    def growth(self, ends: list[int]) -> Growth:
        """Return the table; its pages are not shared."""
        counts = torch.bincount(self.owned, minlength=len(self.k)).int()
        free = counts.eq(0).nonzero()[:, 0].int()
        return Growth(ends, self.table.clone(), torch.zeros(0, 2, dtype=torch.int64), counts, free)

    def write(
        self, pools: Iterable[Tensor], begin: Sequence[int], end: Sequence[int], drafted: bool = False
    ) -> None:
        """Write the slots from `begin` to `end` of each sequence into `pools`; drafted: whether values are wrong."""
        for pool, right in zip(pools, self.whole, strict=True):
            x = 2.0 - right if drafted else right
            for sequence in range(len(begin)):
                slots = torch.arange(begin[sequence], end[sequence])
                if len(slots):
                    pages = self.table[sequence, slots // self.page].long()
                    pool[pages, :, slots % self.page] = x[sequence][:, slots].transpose(0, 1)


def _far_pages(number: int) -> Int[np.ndarray, " pages"]:
    """Return numbers of pages below `number`: the last one, those next to powers of two, and some thousand others."""
    around = [
        power + step for step in (0, -1, 1, -2) for power in (2**24, 2**16, 2**15) if power + step < number
    ]
    return np.array([*dict.fromkeys([number - 1, *around, *range(number - 2, max(0, number - 4096), -1)])])


def _uncleared(shape: tuple[int, ...], dtype: torch.dtype, value: float) -> Tensor:
    """Return a tensor with this value everywhere.

    A very large tensor has zeros instead, which take no memory until they are written.
    """
    if shape[0] > HUGE:
        return torch.from_numpy(np.zeros(shape, np.float16)).to(dtype)
    return torch.full(shape, value, dtype=dtype)


def result(function: Callable[..., Any], case: Case, ring: Ring | None, rank: int, seed: int) -> Result:
    """Return this rank's results of a case. Raises: the function's error; WrongResult if one is invalid."""
    group = None
    if case.world and ring is None:
        group, ranks, mine = _group_of(case.P, rank), case.group_of(rank), rank % 2
        case, rank, seed = replace(case, P=len(ranks), world=""), ranks.index(rank), seed + mine
    needs, run = required(function), case.run(seed)
    paged = case.paged or (0 if needs.isdisjoint(TABLES) else PAGE)
    appended = case.appended or not needs.isdisjoint((*NEW_KEYS, *NEW_VALUES))
    q, k, v, _ = case.inputs(seed)
    meter = PassMeter(rank, case.P, lambda: None, strict=False)
    if case.metered and ring is not None:
        counting = Metered(ring.comm)
        ring, counting.meter = Ring(counting), meter
    over_processes = case.metered and ring is None

    def made(given: dict[str, Any]) -> Any:
        with (
            torch.inference_mode() if case.inference else nullcontext(),
            meter.watch() if over_processes else nullcontext(),
        ):
            return call(function, (), {**given, **around(ring, rank, case.P, group)})

    if case.life:
        return _lived(made, case, rank, q, [k, v], needs, seed)
    cache = _Cache(case, rank, k, v, paged, seed)
    held, found = [0] * case.B, list[Result]()
    for n, ends in case.ends():
        used = cache.used(ends)
        ready = cache.used([end - n for end in ends]) if appended else used
        cache.write((cache.k, cache.v), held, ready)
        cache.write(cache.kept, held, used)
        held = used
        new, keys, values = (
            torch.stack([x[sequence, :, max(n, end) - n : max(n, end)] for sequence, end in enumerate(ends)])
            for x in (q, k, v)
        )
        given: dict[str, Any] = {"q": new, "k": cache.k, "v": cache.v}
        given |= _lengths(case, cache.tokens, ends)
        given |= _arguments(case, run, cache.tokens, cache.table.shape[1] * cache.page)
        given |= _of_pages(cache.growth(ends), needs) if paged else {}
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
        pools = "k", "v"
        kept = copy.deepcopy({name: x for name, x in given.items() if name not in pools})
        returned = made(given)
        found.append(_result(returned, new, values))
        found[-1].changed += [
            name
            for name, pool in zip(pools, cache.kept, strict=True)
            if not _same(given[name][cache.compared], pool[cache.compared])
        ]
        found[-1].changed += [name for name, x in kept.items() if not _same(given[name], x)]
    out = torch.cat([each.out for each in found], dim=2)
    lses = [each.lse for each in found if each.lse is not None]
    lse = torch.cat(lses, dim=2) if len(lses) == len(found) else None
    return Result(out, lse, [name for each in found for name in each.changed], meter.sent)


@lru_cache(maxsize=8)
def _group_of(P: int, rank: int) -> Any:
    """Return the group of the even or of the odd ranks, to which this rank belongs. All ranks must call this."""
    groups = [torch.distributed.new_group([*range(start, P, 2)]) for start in (0, 1)]
    return groups[rank % 2]


def _lived(
    made: Callable[[dict[str, Any]], Any],
    case: Case,
    rank: int,
    q: Tensor,
    kv: list[Tensor],
    needs: set[str],
    seed: int,
) -> Result:
    """Return a rank's results of all calls in a life, as one batch of one sequence."""
    run, n = case.run(seed), case.new[0]
    appended = case.appended or not needs.isdisjoint((*NEW_KEYS, *NEW_VALUES))
    pages = Pages(case.tokens(rank), kv, case.paged, UNCLEARED["10,000"], [case.S, seed])
    found = list[Result]()
    for event in LIVES[case.life](case.common, n):
        if not isinstance(event, Call):
            pages.happen(event)
            continue
        growth = pages.grow(event.batch, n, case.copied)
        for sequence in event.batch:
            pages.write(pages.kept, sequence, n)
            pages.write(() if appended else pages.pools, sequence, n)
        k, v = pages.pools
        new, keys, values = (
            torch.stack(
                [x[at, :, end - n : end] for at, end in zip(event.batch, growth.lengths, strict=True)]
            )
            for x in (q, *kv)
        )
        given: dict[str, Any] = {"q": new, "k": k, "v": v, **_lengths(case, pages.tokens, growth.lengths)}
        given |= _arguments(case, run, pages.tokens, growth.table.shape[1] * pages.page)
        given |= _of_pages(growth, needs, case.copied)
        given |= dict.fromkeys(NEW_KEYS, keys) | dict.fromkeys(NEW_VALUES, values) if appended else {}
        kept = copy.deepcopy(given) | dict(zip("kv", pages.kept, strict=True))
        found.append(_result(made(given), new, values))
        free = ["k", "v", *TABLES, *COUNTS, *FREE] if case.copied == COUNTED else []
        found[-1].changed += [
            name for name, x in given.items() if name not in free and not _same(x, kept[name])
        ]
        if case.copied == COUNTED:
            pages.take_table(event.batch, growth.table)
            found[-1].changed += pages.wrong()
    out = torch.cat([x for each in found for x in each.out], dim=1)[None]
    lses = [each.lse for each in found if each.lse is not None]
    lse = torch.cat([x for each in lses for x in each], dim=1)[None] if len(lses) == len(found) else None
    return Result(out, lse, [name for each in found for name in each.changed])


def _of_pages(growth: Growth, needs: set[str], copied: str = "") -> dict[str, Any]:
    """Return the table, and the arguments for copies of pages if the decode makes the copies or requires them."""
    given = dict.fromkeys(TABLES, growth.table)
    for names, x, how in (
        (COPIES, growth.copies, LISTED),
        (COUNTS, growth.counts, COUNTED),
        (FREE, growth.free, COUNTED),
    ):
        given |= dict.fromkeys(names, x) if copied == how or not needs.isdisjoint(names) else {}
    return given


def _lengths(case: Case, tokens: Int[np.ndarray, " L"], ends: Sequence[int]) -> dict[str, Any]:
    used, longest = [int((tokens < end).sum()) for end in ends], max(ends)
    given: dict[str, Any] = {
        "length": max(used),
        "lengths": [int((case.tokens(rank) < longest).sum()) for rank in range(case.P)],
        "positions": torch.from_numpy(tokens[: max(used)].copy()),
    }
    given |= dict.fromkeys(LOCAL_LENGTHS, torch.tensor(used, dtype=torch.int32))
    return given | dict.fromkeys(TOTAL_LENGTHS, torch.tensor(ends, dtype=torch.int32))


def _arguments(case: Case, run: Run, tokens: Int[np.ndarray, " L"], slots: int) -> dict[str, Any]:
    scale = case.D**-0.5 if run.scale is None else run.scale
    given = {**window_and_softcap(run), **dict.fromkeys(SCALES, scale)}
    given |= dict.fromkeys(SINKS, sinks_of(run)) if run.sinks else {}
    given |= dict.fromkeys(ALIBI, slopes_of(run)) if run.alibi else {}
    if run.pads:
        padding = np.ones(slots, bool)
        padding[: len(tokens)] = run.padding[tokens]
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
    own |= {LISTED: {*COPIES}, COUNTED: {*COUNTS, *FREE}}.get(case.copied, set())
    return {"q", "k", "v", *LENGTHS, *TOTAL_LENGTHS} | own


def arguments_of(case: Case) -> list[str]:
    """Return the fields of `NAMES` that a case sets."""
    return [field for field in NAMES if getattr(case, field) != getattr(Case, field)]
