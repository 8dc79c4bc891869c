"""Pages hold every token of every sequence through forks and frees; unused pages are free."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import CacheError
from ringlab.serving.paged_cache import PagedCache
from ringlab.serving.tables import BlockTables

PAGES = 24
Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "append", "append", "shards", "fork", "free"]), st.integers(0, 9), st.integers(0, 9)),
    max_size=14,
)  # fmt: skip


class Model:
    """The expected contents of the cache: the tokens of each sequence as a list of numbers."""

    def __init__(self) -> None:
        self.sequences: dict[int, list[float]] = {}
        self.next = 1.0

    def new(self, n: int) -> list[float]:
        tokens = [self.next + i for i in range(n)]
        self.next += n
        return tokens


def numbered(tokens: list[float]) -> tuple[Tensor, Tensor]:
    """Return k and v of one head whose numbers are the tokens' numbers."""
    k = torch.tensor(tokens).reshape(1, 1, -1, 1).expand(1, 1, -1, 2).contiguous()
    return k, -k


def take(ring: Ring, steps: list[Step], page: int, interleave: int) -> None:
    """Apply the steps to a cache and to its plain `Model`, and compare cache and model after each step."""
    cache = PagedCache(ring, kv_heads=1, head_dim=2, pages=PAGES, page=page, interleave=interleave)
    model = Model()
    for what, which, n in [("add", 0, 0), *steps]:
        names = sorted(model.sequences)
        name = names[which % len(names)] if names else None
        try:
            if what == "add" or name is None:
                model.sequences[cache.add()] = []
            elif what == "fork":
                length = n % (len(model.sequences[name]) + 1)
                model.sequences[cache.fork(name, length)] = model.sequences[name][:length]
            elif what == "free":
                cache.free(name)
                del model.sequences[name]
            else:
                grow(cache, name, model, n, shards=what == "shards")
        except CacheError:
            assert cache.free_pages < 12, "the cache refused tokens for which it has room"
        compare(cache, model)


def grow(cache: PagedCache, name: int, model: Model, n: int, shards: bool) -> None:
    """Append n tokens to a sequence: every rank gets all of them or, with `shards`, only its own."""
    tokens = model.new(n)
    k, v = numbered(tokens)
    if shards:
        layout = cache.next_layout(name, n)
        mine = layout.shard((k, v), cache.ring.rank)
        assert (
            cache.next_positions(name, layout) == cache.length(name) + layout.positions(cache.ring.rank)
        ).all()
        cache.append_shards(layout, *mine, name)
    else:
        others = [other for other in sorted(model.sequences) if other != name][:1]
        extra = model.new(len(others))
        k, v = numbered(tokens + extra)
        cache.append(k, v, [name, *others], [n, *(1 for _ in others)])
        for other, token in zip(others, extra, strict=True):
            model.sequences[other].append(token)
    model.sequences[name] += tokens


def compare(cache: PagedCache, model: Model) -> None:
    assert cache.sequences == sorted(model.sequences)
    for name, tokens in model.sequences.items():
        shard, lengths = cache.shard(name), cache.lengths(name)
        assert sum(lengths) == cache.length(name) == len(tokens) == shard.length
        assert lengths[cache.ring.rank] == len(shard.positions) == shard.k.shape[2]
        assert max(lengths) - min(lengths) <= cache.interleave, "out of balance"
        assert (np.diff(shard.positions) > 0).all()
        expected = [tokens[position] for position in shard.positions]
        assert shard.k[0, 0, :, 0].tolist() == expected, f"sequence {name} has other tokens"
        assert torch.equal(shard.v, -shard.k)
        everywhere = [cache.positions(name, rank) for rank in range(cache.ring.world_size)]
        assert (np.sort(np.concatenate(everywhere)) == np.arange(len(tokens))).all()
    used = {page for pages in cache.tables.pages.values() for page in pages}
    assert cache.free_pages == PAGES - len(used), "a page is lost, or free while it is used"


@example(
    [
        ("append", 0, 7),
        ("fork", 0, 5),
        ("append", 1, 3),
        ("append", 0, 2),
        ("free", 0, 0),
        ("add", 0, 0),
        ("shards", 0, 4),
    ],
    2,
    2,
    1,
)
@settings(max_examples=30)
@given(STEPS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2]))
def test_sequences_keep_their_tokens(steps: list[Step], P: int, page: int, interleave: int) -> None:
    VirtualCluster(P, memory=False).run(take, steps, page * interleave, interleave)


def test_sequences_that_share_a_page_need_one_copy_less() -> None:
    """Of two sequences that write to a shared page, one copies the page and the other keeps it."""
    tables = BlockTables(pages=2, span=4)
    one = tables.add()
    tables.extend([one], [2])
    other = tables.fork(one)
    assert tables.extend([one, other], [1, 1]) == [(0, 1)]
    assert tables.free_pages == 0


def test_too_few_pages_change_nothing() -> None:
    tables = BlockTables(pages=3, span=4)
    one, other = tables.add(), tables.add()
    tables.extend([one], [6])
    before = repr(vars(tables))
    with pytest.raises(CacheError, match="2 free pages of 4 tokens"):
        tables.extend([one, other], [3, 1])
    assert repr(vars(tables)) == before
