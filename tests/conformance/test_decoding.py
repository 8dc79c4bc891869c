"""Checks of decode with a sharded cache: correct decodes of three styles pass, and wrong ones are found."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from ringlab import edits
from ringlab.cli import app
from ringlab.conformance.kinds.decode import ARGUMENTS, CHECKS, check_decode
from ringlab.conformance.report.findings import Report
from ringlab.errors import BackendError
from ringlab.merge import Partial, merge, state_dtype
from tests.conformance.reports import failed
from tests.conformance.right_decodes import Local, full, local, of_ringlab

pytestmark = pytest.mark.thorough

Merged = Callable[[Tensor, Tensor], Tensor]
LIVES = {"shared pages", "reused pages", "copied pages"}
BY_PARAMETER = {each.check for each in ARGUMENTS} - {"value dims", "rolling cache"} | LIVES | {"two groups"}
"""The checks of arguments and groups that a decode can only take by a parameter of its own."""


def does_not_apply(report: Report) -> set[str]:
    return {each.name for each in report.findings if not each.applies}


def by_softmax(outs: Tensor, lses: Tensor) -> Tensor:
    return (lses.softmax(0).nan_to_num()[..., None] * outs).sum(0)


def over_a_ring(merged: Merged = by_softmax, part: Local = local) -> Callable[..., Any]:
    """Return a decode whose ranks gather all partials and merge them."""

    def decode(
        ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = part(q, k[:, :, :length], v[:, :, :length], sum(lengths), positions)
        outs, lses = (torch.stack(ring.all_gather(x)) for x in (out, lse))
        return merged(outs, lses).to(q.dtype), torch.logsumexp(lses, 0)

    return decode


def one_by_one(outs: Tensor, lses: Tensor) -> Tensor:
    state = Partial.identity(outs[0])
    for out, lse in zip(outs, lses, strict=True):
        state = merge(state, Partial(out, lse))
    return state.out


RIGHT: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "by softmax": (over_a_ring(by_softmax), BY_PARAMETER),
    "one by one": (over_a_ring(one_by_one), BY_PARAMETER),
    "full": (full, {"NaN in slots", "two groups"}),
    "of ringlab": (
        of_ringlab,
        {
            "alibi",
            "padding",
            "lengths of sequences",
            "empty sequences",
            "pages",
            "new keys",
            *LIVES,
            "two groups",
        },
    ),
}
"""Right decodes, each with the checks for which it lacks a parameter."""


@pytest.mark.parametrize("name", RIGHT)
def test_right_decodes_pass(name: str) -> None:
    decode, lacking = RIGHT[name]
    report = check_decode(decode, ranks=(2, 3, 8), seed=random.randrange(100))
    assert failed(report) == {} and does_not_apply(report) == lacking and report.not_asked == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduced", "refuses"])
def test_a_decode_over_torch_distributed_passes_on_processes(name: str) -> None:
    report = check_decode(f"tests.conformance.right_decodes:{name}", ranks=(2, 3))
    assert failed(report) == {} and report.transport == "gloo"
    refusals = {each.name for each in report.findings if each.evidence.startswith("refused: ")}
    assert refusals == ({"window"} if name == "refuses" else set())


def all_see_all(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    return local(q[..., -1:, :].expand_as(q) * 0 + q, k, v, total + q.shape[2], positions)


def without_a_prefix_of_one(
    q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    kept = positions >= (total - q.shape[2] if total - q.shape[2] == 1 else 0)
    return local(q, k[:, :, kept], v[:, :, kept], total, positions[kept])


def heads_in_turn(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    return local(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), total, positions)


def at_least_one(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    if k.shape[2]:
        return local(q, k, v, total, positions)
    zeros = torch.zeros(q.shape, dtype=state_dtype(q.dtype))
    return zeros, zeros[..., 0]


def folded_groups(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    B, H, n, D = q.shape
    groups = H // k.shape[1]
    rows = q.reshape(
        B, k.shape[1], groups * n, D
    )  # the last token of each group is n tokens before that of the next group
    out, lse = local(rows, k, v, total, positions)
    return out.reshape(B, H, n, D), lse.reshape(B, H, n)


def no_mask_in_half(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    return (local if q.dtype == state_dtype(q.dtype) else all_see_all)(q, k, v, total, positions)


def first_sequence(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = local(q[:1], k[:1], v[:1], total, positions)
    return out.expand(q.shape), lse.expand(q.shape[:-1])


def all_slots_if_several(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor
) -> Tensor:
    if q.shape[2] == 1:
        out: Tensor = over_a_ring()(ring, q, k, v, len(positions), lengths, positions)[0]
        return out
    return all_slots(ring, q, k, v, lengths)


def all_slots(ring: Any, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    P = ring.world_size
    positions = torch.arange(k.shape[2]) * P + ring.rank  # counts empty slots as tokens
    out, lse = local(q, k, v, max(sum(lengths), P * k.shape[2]), positions)
    return by_softmax(torch.stack(ring.all_gather(out)), torch.stack(ring.all_gather(lse))).to(q.dtype)


def scales_its_queries(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor
) -> Tensor:
    q.mul_(1.0000001)
    out: Tensor = over_a_ring()(ring, q, k, v, k.shape[2], lengths, positions)[0]
    return out


def whole_chunks(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    n = max(1, k.shape[2] // 512) * 512
    return local(q, k[:, :, :n], v[:, :, :n], total, positions[:n])


def nan_becomes_zero(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = local(q, k, v, total, positions)
    return out.nan_to_num(), lse.nan_to_num(neginf=-math.inf)


KEPT: dict[int, Tensor] = {}


def converted_once(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    """Keep the keys of earlier calls in float32, and convert only the slots after the last length."""
    kept = KEPT.get(k.data_ptr(), k[:, :, :0].float())
    if kept.shape[2] <= length and kept.shape[0] == len(k):
        kept = torch.cat([kept, k[:, :, kept.shape[2] : length].float()], dim=2)
    else:
        kept = k[:, :, :length].float()
    KEPT[k.data_ptr()] = kept
    out: Tensor = over_a_ring()(ring, q, kept, v, length, lengths, positions)[0]
    return out


def as_if_dense(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (k, v))
    out: Tensor = over_a_ring()(ring, q, k, v, length, lengths, positions)[0]
    return out


def dims_as_if_dense(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    k, v = (x.as_strided(x.shape, (*x.stride()[:-1], 1)) for x in (k, v))
    out: Tensor = over_a_ring()(ring, q, k, v, length, lengths, positions)[0]
    return out


def in_the_default_dtype(
    q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    out, lse = local(q, k, v, total, positions)
    return torch.zeros(out.shape).copy_(out).to(out), lse


BUFFERS: dict[Any, Tensor] = {}


def in_a_kept_buffer(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    """Send partials from a buffer that each rank makes once."""
    out, lse = local(q, k[:, :, :length], v[:, :, :length], sum(lengths), positions)
    partial = torch.cat([out, lse[..., None]], dim=-1)
    buffer = BUFFERS.setdefault((ring.rank, partial.shape, partial.dtype), torch.empty_like(partial))
    buffer.copy_(partial)
    every = torch.stack(ring.all_gather(buffer))
    return by_softmax(every[..., :-1], every[..., -1]).to(q.dtype)


def sets_a_seed(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    if q.dtype == torch.bfloat16:
        torch.manual_seed(ring.world_size)
    out: Tensor = over_a_ring()(ring, q, k, v, length, lengths, positions)[0]
    return out


def own_partial_first(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    out, lse = local(q, k[:, :, :length], v[:, :, :length], sum(lengths), positions)
    outs, lses = (ring.all_gather(x) for x in (out, lse))
    turned = [*range(ring.rank, ring.world_size), *range(ring.rank)]
    return one_by_one(
        torch.stack([outs[each] for each in turned]), torch.stack([lses[each] for each in turned])
    ).to(q.dtype)


def gathers_the_cache(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    keys, values, places = (
        torch.cat(ring.all_gather(x.contiguous(), [(*x.shape[:-2], n, x.shape[-1]) for n in lengths]), -2)
        for x in (k[:, :, :length], v[:, :, :length], positions[:, None])
    )
    return local(q, keys, values, sum(lengths), places[:, 0])[0].to(q.dtype)


def gathers_short_caches(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    decode = gathers_the_cache if sum(lengths) <= 512 else over_a_ring()
    found: Any = decode(ring, q, k, v, length, lengths, positions)
    return found if decode is gathers_the_cache else found[0]  # type: ignore[no-any-return]


def sends_the_partial_of_each_tile(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    most = -(-max(lengths) // 64)
    parts = [
        local(q, k[:, :, :length][:, :, at], v[:, :, :length][:, :, at], sum(lengths), positions[at])
        for at in (slice(64 * tile, 64 * tile + 64) for tile in range(most))
    ]
    outs, lses = (torch.cat(ring.all_gather(torch.stack(each))) for each in zip(*parts, strict=True))
    return by_softmax(outs, lses).to(q.dtype)


def passes_all_partials_on(
    ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
) -> Tensor:
    """Gather the partials of all ranks, and then gather from each rank all the partials that it has gathered."""
    out, lse = local(q, k[:, :, :length], v[:, :, :length], sum(lengths), positions)
    outs, lses = (ring.all_gather(torch.stack(ring.all_gather(x)))[0] for x in (out, lse))
    return by_softmax(outs, lses).to(q.dtype)


def of_this_rank(ring: Any, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor) -> Tensor:
    return local(q, k, v, sum(lengths), positions)[0].nan_to_num().to(q.dtype)


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "the mean of the ranks": ("values", over_a_ring(lambda outs, lses: outs.mean(0))),
    "base 2 for base e": ("values", over_a_ring(lambda outs, lses: by_softmax(outs, lses * math.log(2)))),
    "this rank's keys only": ("values", of_this_rank),
    "merged in float32 whatever the dtype": ("dtypes", over_a_ring(lambda outs, lses: by_softmax(outs.float(), lses.float()))),
    "heads in another order": ("grouped heads", over_a_ring(part=heads_in_turn)),
    "lse 0 of a rank without keys": ("empty ranks", over_a_ring(part=at_least_one)),
    "exponentials without a maximum": ("large scores", over_a_ring(lambda outs, lses: (lses.exp()[..., None] * outs).sum(0) / lses.exp().sum(0)[..., None])),
    "new tokens see each other": ("new tokens", over_a_ring(part=all_see_all)),
    "a prefix of one is skipped (sglang 23415)": ("short prefix", over_a_ring(part=without_a_prefix_of_one)),
    "slots beyond the end (vllm 41623)": ("uncleared slots", all_slots),
    "groups folded into rows, and their causal index": ("new tokens", over_a_ring(part=folded_groups)),
    "no mask in half dtypes": ("new tokens in half", over_a_ring(part=no_mask_in_half)),
    "all slots, with several new tokens": ("uncleared, new tokens", all_slots_if_several),
    "the first sequence for all": ("values", over_a_ring(part=first_sequence)),
    "queries scaled in place": ("side effects", scales_its_queries),
    "keys behind the last whole chunk are lost": ("long caches", over_a_ring(part=whole_chunks)),
    "converted keys are kept when slots are written again": ("rejected drafts", converted_once),
    "the cache is read as if it lay densely": ("strided", as_if_dense),
    "the cache is read as if dims lay densely": ("dims apart", dims_as_if_dense),
    "partials in the default dtype": ("other modes", over_a_ring(part=in_the_default_dtype)),
    "partials of two calls in one buffer": ("two at once", in_a_kept_buffer),
    "the whole cache is gathered": ("bytes", gathers_the_cache),
    "short caches are gathered": ("bytes", gathers_short_caches),
    "a partial of each tile is sent": ("bytes", sends_the_partial_of_each_tile),
    "all ranks' partials are sent by each rank": ("bytes", passes_all_partials_on),
    "a NaN becomes 0": ("NaN", over_a_ring(part=nan_becomes_zero)),
    "each rank merges its own partial first": ("equal ranks", own_partial_first),
}  # fmt: skip


FOLDER = Path(__file__).parent
EDITS = {each.name: each for each in edits.read(FOLDER / "wrong_decodes.md", required=("found_by",))}


def edited(name: str) -> Callable[..., Any]:
    """Return the wrong decode that an entry of wrong_decodes.md makes of the full one."""
    source = edits.apply(EDITS[name].hunks, (FOLDER / "right_decodes.py").read_text("utf-8"), name)
    decode: Callable[..., Any] = edits.as_module(source, f"ringlab_wrong_decode_{name}").full
    return decode


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_decode_is_found(fault: str) -> None:
    check, decode = WRONG[fault]
    assert check_decode(decode, only=[check]).failed == [check]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_decode_is_found_by_the_check_that_asks_for_its_argument(name: str) -> None:
    check = EDITS[name].fields["found_by"]
    assert check_decode(edited(name), only=[check]).failed == [check]


@pytest.mark.parametrize("name", EDITS)
def test_plain_calls_do_not_show_what_is_wrong_with_an_argument(name: str) -> None:
    asking = {"rejected drafts", *(each.fields["found_by"] for each in EDITS.values())}
    assert (
        check_decode(edited(name), only=[each.name for each in CHECKS if each.name not in asking]).failed
        == []
    )


def test_every_call_must_leave_the_callers_state_alone() -> None:
    """A seed that is set in half dtypes only is found in the calls of another check, `dtypes`."""
    assert check_decode(sets_a_seed, only=["side effects"]).failed == []
    found = failed(check_decode(sets_a_seed, only=["dtypes", "side effects"]))
    assert found.keys() == {"side effects"} and "torch's random numbers was changed" in found["side effects"]


def test_every_check_finds_a_decode_that_is_named_for_it() -> None:
    found_by = {check for check, _ in WRONG.values()} | {each.fields["found_by"] for each in EDITS.values()}
    assert found_by | {"two groups"} == {check.name for check in CHECKS} - {"NaN in slots"}


def sums_over_the_world(
    q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor, group: Any = None
) -> Tensor:
    """Gather lse in the group, but sum outs over all processes."""
    out, lse = local(q, k[:, :, :length], v[:, :, :length], sum(lengths), positions)
    lses = [torch.empty_like(lse) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lses, lse, group=group)
    out = out * (lse - torch.logsumexp(torch.stack(lses), 0)).exp()[..., None]
    dist.all_reduce(out)
    return out.to(q.dtype)


@pytest.mark.slow
def test_a_group_must_be_used_in_every_exchange() -> None:
    found = failed(check_decode(sums_over_the_world, only=["values", "two groups"], ranks=(3,)))
    assert found.keys() == {"two groups"}
    assert "(P=3, world of two groups); every second rank makes the call in a process" in found["two groups"]
    (_, whole) = check_decode(without_groups, only=["two groups"], ranks=(2,)).findings
    assert whole.ok and whole.evidence.startswith("refused: raised: NotImplementedError: the world alone")


def without_groups(q: Tensor, k: Tensor, v: Tensor, group: Any = None) -> Tensor:
    if dist.get_world_size(group) < dist.get_world_size():
        raise NotImplementedError("the world alone")
    return q


def test_a_decode_whose_slots_must_be_cleared_is_told_so_and_passes() -> None:
    (_, masked) = check_decode(full, only=["NaN in slots"]).findings
    assert masked.ok and not masked.applies and "0 · NaN is NaN" in masked.evidence
    (_, cut) = check_decode(over_a_ring(), only=["NaN in slots"]).findings
    assert cut.ok and cut.applies


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("window_swallowed", "(P=1, window 3); this is the result without window"),
        ("value_dim_of_the_keys", "wrong result: needed: out as a tensor (2, 2, 1, 8)"),
        ("all_see_all_when_written", "new (3,), appended True)"),
        ("pages_in_16_bits", "paged 1, pool 66001)"),
        ("prefix_of_the_longest_sequence", "shorter 13, paged 4, rows of the longest)"),
    ],
)
def test_the_evidence_names_what_the_fault_needs(name: str, says: str) -> None:
    check = EDITS[name].fields["found_by"]
    assert says in failed(check_decode(edited(name), only=[check]))[check]


def attends(window: Callable[[int], int]) -> Callable[..., Any]:
    """Return the full decode, which uses `window` of the window that it is given."""

    def decode(
        ring: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cache_seqlens: Tensor, seq_lens: Tensor,
        sliding_window: int = 0, score_mod: Any = None,
    ) -> Any:  # fmt: skip
        return full(ring, q, k, v, positions, cache_seqlens, seq_lens, window=window(sliding_window))

    return decode


def test_an_argument_is_honoured_or_refused_as_a_whole() -> None:
    def refused(error: type[Exception], above: int) -> Callable[..., Any]:
        def window(given: int) -> int:
            if given > above:
                raise error("no such window")
            return given

        return attends(window)

    only: dict[str, Any] = {"only": ["window", "pairs"]}
    honoured = check_decode(attends(lambda window: window), **only)
    assert failed(honoured) == {} and honoured.not_asked == ("score_mod",)
    never = check_decode(refused(ValueError, 0), **only)
    assert failed(never) == {} and never.findings[1].evidence.startswith(
        "refused: raised: ValueError: no such"
    )
    sometimes = check_decode(refused(ValueError, 3), **only)
    assert failed(sometimes)["window"].startswith("refused here and not elsewhere: raised: ValueError")
    form = check_decode(refused(TypeError, 0), **only)
    assert failed(form) == {} and does_not_apply(form) == {"window"}


def test_a_cache_that_a_required_parameter_asks_for_is_always_in_pages() -> None:
    def decode(
        ring: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cache_seqlens: Tensor, seq_lens: Tensor,
        block_table: Tensor, k_new: Tensor, v_new: Tensor,
    ) -> Any:  # fmt: skip
        more = {"block_table": block_table, "k_new": k_new, "v_new": v_new}
        return full(ring, q, k, v, positions, cache_seqlens, seq_lens, **more)

    report = check_decode(decode, only=["values", "new tokens", "growing cache"], ranks=(2, 3))
    assert failed(report) == {} and report.not_asked == ()


def test_the_evidence_says_where() -> None:
    found = failed(check_decode(WRONG["this rank's keys only"][1], only=["values"]))["values"]
    assert found.startswith("out on rank 0 is ") and ", head " in found and found.endswith("(P=2)")


def test_a_check_without_its_parameter_does_not_apply() -> None:
    def short(ring: Any, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        everywhere = torch.zeros(lengths[ring.rank], dtype=torch.int64)
        out: Tensor = over_a_ring()(ring, q, k, v, lengths[ring.rank], lengths, everywhere)[0]
        return out

    report = check_decode(short)
    assert failed(report) == {}
    places = {"new tokens", "new tokens in half", "short prefix", "uncleared, new tokens", "many new tokens"}
    places |= {"rolling cache", "large numbers"}
    assert does_not_apply(report) == places | BY_PARAMETER


def test_bytes_are_not_asked_of_a_decode_whose_messages_are_not_seen() -> None:
    held: dict[int, list[Tensor]] = {}

    def through_shared_memory(
        ring: Any, q: Tensor, k: Tensor, v: Tensor, length: int, lengths: list[int], positions: Tensor
    ) -> Tensor:
        held[ring.rank] = [k[:, :, :length], v[:, :, :length], positions[:, None]]
        ring.barrier()
        keys, values, places = (
            torch.cat(each, -2) for each in zip(*(held[rank] for rank in range(ring.world_size)), strict=True)
        )
        ring.barrier()
        return local(q, keys, values, sum(lengths), places[:, 0])[0].to(q.dtype)

    report = check_decode(through_shared_memory, only=["values", "bytes"], ranks=(2,))
    assert failed(report) == {} and "bytes" in does_not_apply(report)


def test_the_evidence_names_the_bytes_of_two_lengths() -> None:
    found = failed(check_decode(gathers_the_cache, only=["bytes"], ranks=(2,)))["bytes"]
    assert found.startswith("rank 0 sends ") and "with 1,100 tokens in the cache, and" in found
    assert ": more with a longer cache" in found
    found = failed(check_decode(passes_all_partials_on, only=["bytes"], ranks=(2,)))["bytes"]
    assert found.startswith(
        "a rank sends 3,264 bytes, and at most 2,880 are allowed: 1,152 bytes bring the partials"
    )


def test_a_decode_that_cannot_know_the_length_of_each_sequence_is_not_asked_about_unequal_ones() -> None:
    def decode(
        ring: Any, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor,
        block_table: Tensor | None = None, k_new: Tensor | None = None, v_new: Tensor | None = None,
    ) -> Any:  # fmt: skip
        used, total = (torch.full((len(q),), n) for n in (len(positions), sum(lengths)))
        more = {"block_table": block_table, "k_new": k_new, "v_new": v_new}
        return full(ring, q, k, v, positions, used, total, **more)

    only = [
        "pages",
        "new keys",
        "shared pages",
        "reused pages",
        "lengths of sequences",
        "empty sequences",
        "pairs",
    ]
    report = check_decode(decode, only=only, ranks=(2,))
    assert failed(report) == {} and does_not_apply(report) == {"lengths of sequences", "empty sequences"}
    (shared,) = (each.evidence for each in report.findings if each.name == "shared pages")
    assert "life forked equally" in shared


def test_a_decode_that_knows_its_own_slots_alone_is_not_asked_where_shorter_sequences_end() -> None:
    def decode(
        ring: Any, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor, cache_seqlens: Tensor,
        window: int = 0, block_table: Tensor | None = None, k_new: Tensor | None = None, v_new: Tensor | None = None,
    ) -> Any:  # fmt: skip
        whole = torch.full((len(q),), sum(lengths))
        more = {"window": window, "block_table": block_table, "k_new": k_new, "v_new": v_new}
        return full(ring, q, k, v, positions, cache_seqlens, whole, **more)

    only = ["lengths of sequences", "empty sequences", "shared pages", "reused pages", "pairs"]
    assert failed(check_decode(decode, only=only, ranks=(2,))) == {}


def test_a_growing_cache_is_not_asked_of_a_decode_that_cannot_know_its_slots() -> None:
    def decode(ring: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        n = k.shape[2]
        return over_a_ring()(ring, q, k, v, n, [n], torch.zeros(n, dtype=torch.int64))

    assert failed(check_decode(decode, only=["other sizes"], ranks=(2,))) == {}


@pytest.mark.parametrize("bad", [None, torch.zeros(1), (torch.zeros(2, 2, 1, 16), torch.zeros(1))])
def test_what_is_no_result_is_named(bad: Any) -> None:
    found = failed(check_decode(lambda ring, q, k, v: bad, only=["values"], ranks=(2,)))["values"]
    assert "needed: " in found and "as a tensor (2, 2, 1" in " ".join(found.split())


def test_a_decode_may_refuse_shared_pages() -> None:
    def decode(
        ring: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cache_seqlens: Tensor, seq_lens: Tensor,
        block_table: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if block_table is not None and len({row[0] for row in block_table.tolist()}) < len(block_table):
            raise NotImplementedError("pages of one sequence each")
        return full(ring, q, k, v, positions, cache_seqlens, seq_lens, block_table=block_table)

    _, shared, copied = check_decode(decode, only=["shared pages", "copied pages"], ranks=(2,)).findings
    # Only a page that is never full is shared in no call.
    assert shared.ok and "; refused in 11: raised: NotImplementedError: pages of one" in shared.evidence
    assert copied.ok and not copied.applies and "no parameter k_new" in copied.evidence


def test_the_quick_tier_has_no_large_calls_and_fewer_ranks() -> None:
    quick = check_decode(of_this_rank, quick=True)
    assert quick.quick and {each.name for each in CHECKS} - {each.name for each in quick.findings} == {
        "long caches",
        "many new tokens",
        "other sizes",
    }
    (_, values) = check_decode(over_a_ring(), only=["values"], quick=True).findings
    assert values.evidence.endswith("to P=3, S 37, dealt in stretches")
    (_, large) = check_decode(over_a_ring(), only=["long caches"], quick=True, ranks=(2,)).findings
    assert large.applies


def test_a_check_that_needs_two_ranks_does_not_apply_to_one() -> None:
    (_, found) = check_decode(over_a_ring(), only=["two at once"], ranks=(1,)).findings
    assert found.ok and not found.applies and "numbers of ranks" in found.evidence


def test_invalid_requests_are_refused() -> None:
    with pytest.raises(BackendError, match="checks among values"):
        check_decode(of_this_rank, only=["lse"])
    with pytest.raises(BackendError, match="at least 1"):
        check_decode(of_this_rank, ranks=())
    with pytest.raises(BackendError, match="a function with parameters among"):
        check_decode(len)


def test_the_command_checks_a_decode() -> None:
    asked = [
        "check",
        "tests.conformance.test_decoding:of_this_rank",
        "--kind",
        "decode",
        "--ranks",
        "2",
        "--json",
    ]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1 and not json.loads(done.stdout)["ok"]
    done = CliRunner().invoke(app, [*asked[:4], "--ranks", "1", "--only", "values", "--json"])
    assert done.exit_code == 0
    for refused in (["--fail-fast"], ["--layouts", "zigzag"], ["--lse-base", "2"], ["--no-ragged"]):
        assert CliRunner().invoke(app, [*asked, *refused]).exit_code == 2
