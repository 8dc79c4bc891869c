"""A prompt in chunks of any lengths equals one prefill, whether K/V or queries travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome
from ringlab.mask import Mask
from ringlab.serving import chunks as module
from ringlab.serving.decode import decode_heads
from ringlab.serving.paged_cache import PagedCache
from tests.laws.draw import MAKERS
from tests.serving.problems import Prompt, assert_prompt, assert_rows, feed, whole


def on_virtual_ranks(case: Prompt) -> Outcome:
    return VirtualCluster(case.P, memory=False).run(feed, case)


@st.composite
def prompts(draw: Any) -> Prompt:
    P, K, group = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lengths = tuple(draw(st.integers(1, 13)) for _ in range(draw(st.integers(1, 4))))
    interleave = draw(st.sampled_from([1, 2, 3]))
    window = st.one_of(st.none(), st.integers(1, 8))
    mask = Mask(window=draw(window), prefix=draw(st.integers(0, lengths[0])))
    layout, how = draw(st.sampled_from([None, *MAKERS])), draw(st.sampled_from(["q", "kv"]))
    page = interleave * draw(st.integers(1, 3))
    sunk = draw(st.booleans())
    Dv = draw(st.sampled_from([8, 3]))
    return Prompt(P, lengths, K * group, K, layout, page, interleave, how, mask, sunk=sunk, Dv=Dv)


@settings(max_examples=20)
@given(prompts())
def test_chunks_of_any_lengths_are_one_prefill(case: Prompt) -> None:
    assert_prompt(on_virtual_ranks(case).results, case)


def test_a_prefix_is_computed_once() -> None:
    """A second prompt with an equal beginning starts from the first one's pages, and its rows are right."""

    def program(ring: Ring) -> tuple[Tensor, Tensor, int]:
        cache = PagedCache(ring, kv_heads=2, head_dim=8, pages=12, page=2, dtype=torch.float64)
        first = cache.add()
        for start, stop in ((0, 13), (13, 20)):
            shards(ring, cache, first, one, start, stop)
        taken = cache.free_pages
        second = cache.fork(first, 13)
        out, lse = shards(ring, cache, second, other, 13, 22)
        held = [cache.shard(name).k for name in (first, second)]
        positions = [torch.from_numpy(cache.positions(name)) for name in (first, second)]
        assert torch.equal(held[0], one[1][:, :, positions[0]]), "the first prompt has changed"
        assert torch.equal(held[1], other[1][:, :, positions[1]])
        return out, lse, taken - cache.free_pages

    def shards(ring: Ring, cache: PagedCache, name: int, sequence: Any, start: int, stop: int) -> Any:
        layout = cache.next_layout(name, stop - start)
        parts = layout.shard(tuple(x[:, :, start:stop] for x in sequence), ring.rank)
        return module.prefill(*parts, cache, name, layout=layout, return_lse=True)

    one, tail = whole(1, 4, 2, 20, 8, 0, torch.float64), whole(1, 4, 2, 9, 8, 1, torch.float64)
    other = tuple(torch.cat([x[:, :, :13], y], dim=2) for x, y in zip(one, tail, strict=True))
    results = VirtualCluster(3, memory=False).run(program).results
    out = torch.empty(1, 4, 9, 8, dtype=torch.float64)
    lse = torch.empty(1, 4, 9, dtype=torch.float64)
    for rank, (rows, of_rows, new_pages) in enumerate(results):
        here = slice((rank - 13) % 3, None, 3)  # token 13 + i is on rank (13 + i) mod 3
        out[:, :, here], lse[:, :, here] = rows, of_rows
        assert new_pages == 2  # 22 tokens on 3 ranks take 4 pages of 2 tokens on each; 2 of these are shared
    assert_rows(out, lse, other, slice(13, 22), mask=Mask())


CASE = Prompt(3, (24, 3), H=8, K=1)


def test_the_choice_is_the_one_that_sends_less() -> None:
    """With grouped heads, K/V of a first chunk travel; after a long prefix, queries of a short chunk travel."""
    traces = {way: on_virtual_ranks(replace(CASE, travels=way)).trace for way in ("kv", "q", "auto")}
    sent = {way: sum(e.bytes_sent for e in trace.exchanges()) for way, trace in traces.items()}
    assert sent["auto"] < min(sent["kv"], sent["q"])
    assert [(e.asked, e.chosen) for e in traces["auto"].choices(0)] == [
        ("travels='auto'", "kv"),
        ("travels='auto'", "q"),
    ]


def rotated(x: Tensor, positions: Any) -> Tensor:
    """Return x with a rotary embedding in float64, which tells positions apart."""
    angles = torch.as_tensor(positions, dtype=torch.float64)[:, None] / torch.tensor([1.0, 3.0, 9.0, 27.0])
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def rotary(ring: Ring) -> tuple[Tensor, Tensor]:
    """Feed a prompt of 12 tokens in two chunks, then a token, with q and k rotated by cache positions."""
    cache = PagedCache(ring, kv_heads=2, head_dim=8, pages=8, page=2, dtype=torch.float64)
    name = cache.add()
    for start, stop in ((0, 7), (7, 12)):
        layout = cache.next_layout(name, stop - start)
        q, k, v = layout.shard(tuple(x[:, :, start:stop] for x in ROTARY), ring.rank)
        where = cache.next_positions(name, layout)
        module.prefill(rotated(q, where), rotated(k, where), v, cache, name, layout=layout)
    q, k, v = (x[:, :, 12:] for x in ROTARY)
    where = cache.next_positions(name, 1)
    cache.append(rotated(k, where), v, [name])
    return decode_heads(rotated(q, where), cache, [name], queries="all", return_lse=True)


ROTARY = whole(1, 6, 2, 13, 8, 5, torch.float64)


def test_positions_for_rotary_embeddings_are_the_sequence_s_own() -> None:
    results = VirtualCluster(3, memory=False).run(rotary).results
    out, lse = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    q, k, v = ROTARY
    where = torch.arange(13)
    assert_rows(out, lse, (rotated(q, where), rotated(k, where), v), slice(12, 13), mask=Mask())
