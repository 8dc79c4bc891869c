"""`ring_attention` refuses wrong calls with a clear error on every rank, before data moves and without a hang."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, attention, launch, ring_attention
from ringlab.blocks.native import Native
from ringlab.comm.protocol import CONTROL, Comm, Tensors, Work, Wrapper
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.comm.trace import Outcome
from ringlab.comm.wrappers.strict import Strict
from ringlab.cost.shape_block import ShapeBlock
from ringlab.errors import (
    AgreementError,
    BackendError,
    CommError,
    DeviceError,
    DtypeError,
    LayoutError,
    MaskError,
    RankFailedError,
    RinglabError,
    ShapeError,
    WorldSizeError,
)
from ringlab.layout import contiguous, dealt, striped, zigzag
from ringlab.mask import Mask
from ringlab.schedules import available as schedules
from ringlab.schedules import ulysses
from ringlab.schedules.ring import RingSchedule
from tests.blocks.device_calls import rewritten
from tests.schedules.problems import Broken, Plain

S, P = 24, 2
Arguments = dict[str, Any]
Spoil = Callable[[Arguments], None]


class Deaf(RingSchedule):
    """A schedule that ignores sinks."""

    takes_sinks = False


def arguments(ring: Ring) -> Arguments:
    """Return the arguments of a correct call."""
    layout = zigzag(S, ring.world_size)
    length = layout.length(ring.rank)
    q, k = torch.ones(1, 4, length, 8), torch.ones(1, 2, length, 8)
    return {"q": q, "k": k, "v": k.clone(), "ring": ring, "layout": layout, "causal": True, "block": "naive"}


def call(ring: Ring, spoils: dict[int, Spoil]) -> Tensor | RinglabError:
    """Call attention after `spoils` has changed this rank's arguments; return the output or the error."""
    x = arguments(ring)
    if ring.rank in spoils:
        spoils[ring.rank](x)
    try:
        return ring_attention(x.pop("q"), x.pop("k"), x.pop("v"), **x)
    except RinglabError as error:
        return error


def put(name: str, change: Callable[[Any], Any]) -> Spoil:
    def spoil(x: Arguments) -> None:
        x[name] = change(x[name])

    return spoil


def whole_sequence(x: Arguments) -> None:
    for name in ("q", "k", "v"):
        x[name] = torch.ones(1, x[name].shape[1], S, 8)


def one_head_too_few(x: Arguments) -> None:
    for name in ("k", "v"):
        x[name] = torch.ones(1, 3, *x[name].shape[2:])


def no_heads(x: Arguments) -> None:
    for name in ("k", "v"):
        x[name] = x[name][:, :0]


def integers(x: Arguments) -> None:
    for name in ("q", "k", "v"):
        x[name] = x[name].long()


def everything(change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(x: Arguments) -> None:
        for name in ("q", "k", "v"):
            x[name] = change(x[name])

    return spoil


WRONG: dict[str, tuple[Spoil, type[RinglabError], str]] = {
    "three axes": (put("q", lambda q: q[0]), ShapeError, "q as a tensor (batch, heads, tokens, head dim)"),
    "no tensor": (put("v", lambda v: v.numpy()), ShapeError, "ndarray"),
    "another batch": (put("q", lambda q: q.repeat(2, 1, 1, 1)), ShapeError, "q (2, 4, 12, 8)"),
    "another head dim": (put("k", lambda k: k[..., :4]), ShapeError, "k (1, 2, 12, 4)"),
    "no head dim of v": (put("v", lambda v: v[..., :0]), ShapeError, "v (1, 2, 12, 0)"),
    "v unlike k": (put("v", lambda v: v[:, :1]), ShapeError, "v (1, 1, 12, 8)"),
    "heads that do not divide": (one_head_too_few, ShapeError, "divides 4: 1, 2, 4"),
    "no key/value heads": (no_heads, ShapeError, "divisible"),
    "a shard too short": (put("q", lambda q: q[..., 1:, :]), ShapeError, "12 tokens"),
    "heads behind tokens": (everything(lambda t: t.transpose(1, 2)), ShapeError, "q.transpose(1, 2)"),
    "unsharded": (whole_sequence, ShapeError, "layout.shard(q, ring.rank)"),
    "mixed dtypes": (put("k", lambda k: k.double()), DtypeError, "torch.float64"),
    "integers": (integers, DtypeError, "floating point"),
    "mixed devices": (put("v", lambda v: v.to("meta")), DeviceError, "meta"),
    "a layout for another S": (
        put("layout", lambda layout: zigzag(S + 8, layout.P)),
        ShapeError,
        "16 tokens",
    ),
    "a layout for another P": (put("layout", lambda _: zigzag(S, 3)), WorldSizeError, "layout with P="),
    "S and P swapped": (
        lambda x: x.update(layout=zigzag(x["ring"].world_size, S)), WorldSizeError, f"(S={S}, P=2)",
    ),
    "two axes": (put("q", lambda q: q[0, 0]), ShapeError, "q[None, None]"),
    "packed": (put("q", lambda q: torch.stack([q] * 3)), ShapeError, "unbind"),
    "q for k": (lambda x: x.update(q=x["k"], k=x["q"], v=x["q"]), ShapeError, "were the two swapped"),
    "without data": (everything(lambda t: t.to("meta")), DeviceError, "tensors with data"),
    "no layout": (put("layout", lambda _: "zigzag"), LayoutError, "zigzag(S, P)"),
    "an unknown block": (put("block", lambda _: "fast"), BackendError, "'fast'"),
    "no block": (put("block", lambda _: None), BackendError, "got: None"),
    "a scale that is no number": (lambda x: x.update(scale="small"), DtypeError, "'small'"),
    "a scale without end": (lambda x: x.update(scale=float("inf")), DtypeError, "inf"),
    "a scale that is not a number": (lambda x: x.update(scale=float("nan")), DtypeError, "nan"),
    "a scale that is infinite in float32": (
        lambda x: x.update(scale=1e300),
        DtypeError,
        "finite in torch.float32",
    ),
    "a scale beyond float64": (lambda x: x.update(scale=10**400), DtypeError, "finite in torch.float32"),
    "no head dim": (everything(lambda t: t[..., :0]), ShapeError, "head dim"),
    "a softcap of 0": (lambda x: x.update(softcap=0.0), MaskError, "softcap=None"),
    "a softcap that a block has not": (
        lambda x: x.update(softcap=30.0, block=Plain()),
        BackendError,
        "'plain'",
    ),
    "dropout that a block has not": (
        lambda x: x.update(dropout=0.1, seed=1, block=Plain()),
        BackendError,
        "block='blockwise'",
    ),
    "all dropped": (lambda x: x.update(dropout=1.0, seed=1), MaskError, "dropout"),
    "dropout without a seed": (lambda x: x.update(dropout=0.1), MaskError, "the same"),
    "causal that is no bool": (lambda x: x.update(causal="no"), MaskError, "causal=True or causal=False"),
    "causal left empty": (lambda x: x.update(causal=None), MaskError, "causal=True or causal=False"),
    "an invalid mask": (lambda x: x.update(mask="causal"), MaskError, "a str"),
    "a mask beside causal=False": (lambda x: x.update(causal=False, mask=Mask()), MaskError, "Mask(causal="),
    "causal=True beside a mask that is not": (
        lambda x: x.update(causal=True, mask=Mask(causal=False)), MaskError, "pass mask= alone",
    ),
    "positions that begin at 1": (
        lambda x: x.update(position_ids=x["layout"].positions(x["ring"].rank) + 1), LayoutError, "pass ids - 1",
    ),
    "tokens cut by another layout": (
        lambda x: x.update(position_ids=torch.arange(x["q"].shape[2]).flip(0)), LayoutError, "for local token 0",
    ),
    "documents of another length": (
        lambda x: x.update(mask=Mask(documents=(S, 1))),
        MaskError,
        f"2 documents of {S + 1} tokens",
    ),
    "an unknown schedule": (lambda x: x.update(schedule="tree"), BackendError, "'tree'"),
    "sinks of other heads": (lambda x: x.update(sinks=torch.zeros(3)), ShapeError, "sinks as a tensor (4,)"),
    "a sink that is no tensor": (lambda x: x.update(sinks=0.5), ShapeError, "float"),
    "sinks of integers": (lambda x: x.update(sinks=torch.zeros(4).long()), DtypeError, "floating point"),
    "a schedule that knows no sinks": (
        lambda x: x.update(sinks=torch.zeros(4), schedule=Deaf()), BackendError, "a schedule that takes sinks",
    ),
}  # fmt: skip

DIFFERENT: dict[str, Spoil] = {
    "layouts of equal lengths": put("layout", lambda _: striped(S, P)),
    "contiguous on one": put("layout", lambda _: contiguous(S, P)),
    "layouts of one name": put("layout", lambda layout: dealt(S, P, chunk=3, name=layout.name)),
    "causal": put("causal", lambda _: False),
    "scale": lambda x: x.update(scale=2.0),
    "block": put("block", lambda _: "blockwise"),
    "schedule": lambda x: x.update(schedule="allgather"),
    "batch": everything(lambda t: t.repeat(2, 1, 1, 1)),
    "head dim": everything(lambda t: t[..., :4]),
    "head dim of v": put("v", lambda v: v[..., :4]),
    "heads": put("q", lambda q: q[:, :2]),
    "dtype": everything(lambda t: t.double()),
    "window": lambda x: x.update(mask=Mask(window=3)),
    "documents": lambda x: x.update(mask=Mask(documents=(1, S - 1))),
    "softcap": lambda x: x.update(softcap=2.0),
    "dropout": lambda x: x.update(dropout=0.5, seed=1),
    "gradients": put("q", lambda q: q.requires_grad_()),
    "sinks": lambda x: x.update(sinks=torch.zeros(4)),
}


def run(spoils: dict[int, Spoil]) -> Outcome:
    outcome = VirtualCluster(P, memory=False).run(call, spoils)
    assert outcome.trace.bytes_sent() == 0, "data moved before the ranks agreed"
    return outcome


def assert_clear(error: Any, kind: type[RinglabError], words: str) -> None:
    assert type(error) is kind, error
    assert error.needed
    assert words in str(error)


def test_a_scale_may_be_as_large_as_the_scores() -> None:
    """A float64 call accepts a scale that only float64 can represent, because its scores are float64."""
    large: Spoil = lambda x: x.update({name: 0 * x[name].double() for name in "qkv"}, scale=1e300)  # noqa: E731
    outcome = VirtualCluster(P, memory=False).run(call, dict.fromkeys(range(P), large))
    assert all(torch.is_tensor(out) and (out == 0).all() for out in outcome.results)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", WRONG)
def test_some_ranks_called_wrongly(name: str, ranks: tuple[int, ...]) -> None:
    """A rank with a wrong call reports its mistake; a rank with a correct call reports the other rank's error."""
    spoil, kind, words = WRONG[name]
    for rank, error in enumerate(run(dict.fromkeys(ranks, spoil)).results):
        if rank in ranks:
            assert_clear(error, kind, words)
            continue
        assert_clear(error, AgreementError, f"rank {ranks[0]}: error {kind.__name__}")
        remedies = [line for line in str(error).splitlines() if line.startswith("remedy:")]
        assert remedies == ["remedy: no data was sent; fix the call of the rank that differs"]


@pytest.mark.parametrize("name", WRONG)
def test_a_single_rank(name: str) -> None:
    """A single rank refuses the same calls as many ranks do, except that its shard is the whole sequence."""
    spoil, kind, _ = WRONG[name]
    [answer] = VirtualCluster(1).run(call, {0: spoil}).results
    if name == "unsharded":
        assert isinstance(answer, Tensor)
    else:
        assert type(answer) is kind


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_called_differently(name: str) -> None:
    """Every rank reports rank 1 if its call, valid on its own, differs from the others' calls."""
    for error in run({1: DIFFERENT[name]}).results:
        assert_clear(error, AgreementError, "rank 1: ")


def test_an_error_that_nobody_foresaw_is_told_to_the_others() -> None:
    def program(ring: Ring) -> Any:
        if ring.rank:
            return call(ring, {})
        with pytest.raises(KeyError, match="on this machine"):
            call(ring, {0: put("block", lambda _: Broken())})

    _, error = VirtualCluster(P, memory=False).run(program).results
    assert_clear(error, AgreementError, "rank 0: error KeyError: 'on this machine'")


def test_many_ranks_that_differ_are_quoted_once_each() -> None:
    """The error quotes each different text once, at most four texts, and the words in which they differ."""
    many = 64
    spoil: Spoil = put("causal", lambda _: False)
    for error in VirtualCluster(many, memory=False).run(call, {63: spoil}).results:
        assert "ranks 0 to 62: zigzag" in str(error) and "rank 63: zigzag" in str(error)
        assert "they differ in: causal=True | causal=False" in str(error) and len(str(error)) < 1000
    spoils: dict[int, Spoil] = {rank: lambda x, s=1.0 + rank: x.update(scale=s) for rank in range(many)}  # type: ignore[misc]
    for error in VirtualCluster(many, memory=False).run(call, spoils).results:
        assert "60 others" in str(error) and len(str(error)) < 2000


@pytest.mark.parametrize("other", [lambda ring: None, lambda ring: ring.shift(torch.ones(1))])
def test_one_rank_that_calls_alone_is_told(other: Callable[[Ring], Any]) -> None:
    said: list[str] = []

    def program(ring: Ring) -> Any:
        if ring.rank:
            return other(ring)
        answer = call(ring, {})
        said.append(str(answer))
        raise answer

    with pytest.raises(CommError):
        VirtualCluster(P, memory=False).run(program)
    assert "call this on every rank of the ring" in said[0]


def test_masks_of_one_kind_that_differ() -> None:
    """Ranks are refused if only the lengths of their documents, their prefixes or their seeds differ."""
    for one, other in (
        ({"mask": Mask(documents=(4, S - 4))}, {"mask": Mask(documents=(5, S - 5))}),
        ({"mask": Mask(prefix=3)}, {"mask": Mask(prefix=4)}),
        ({"dropout": 0.5, "seed": 1}, {"dropout": 0.5, "seed": 2}),
    ):
        spoils: dict[int, Spoil] = {0: lambda x, w=one: x.update(w), 1: lambda x, w=other: x.update(w)}  # type: ignore[misc]
        for error in run(spoils).results:
            assert_clear(error, AgreementError, "rank 1: ")


def test_auto_takes_a_block_that_can() -> None:
    for more in ({"softcap": 3.0}, {"dropout": 0.2, "seed": 5}):
        spoil: Spoil = lambda x, w=more: x.update(w, block="auto")  # type: ignore[misc] # noqa: E731
        outcome = VirtualCluster(P, memory=False).run(call, dict.fromkeys(range(P), spoil))
        assert all(torch.is_tensor(out) for out in outcome.results)
        assert {choice.chosen for choice in outcome.trace.choices()} == {"blockwise"}


@pytest.mark.parametrize("block", ["native", Native()], ids=["name", "object"])
def test_the_block_that_computes_in_place_of_native_is_recorded(block: str | Native) -> None:
    """The result names the block that computed in place of the native one, and has the bits of that block."""
    more = {"softcap": 3.0, "dropout": 0.2, "seed": 5}

    def outcome(chosen: Any) -> Outcome:
        spoil: Spoil = lambda x: x.update(more, block=chosen)  # noqa: E731
        return VirtualCluster(P, memory=False).run(call, dict.fromkeys(range(P), spoil))

    found, expected = outcome(block), outcome("blockwise")
    for one, other in zip(found.results, expected.results, strict=True):
        assert torch.equal(one, other)
    recorded = {(choice.asked, choice.chosen) for choice in found.trace.choices()}
    assert recorded == {("block='native' with dropout and softcap", "blockwise")}
    assert expected.trace.choices() == []
    with_neither = VirtualCluster(P, memory=False).run(
        call, {rank: lambda x: x.update(block=block) for rank in range(P)}
    )
    assert with_neither.trace.choices() == []


def test_position_ids_may_be_global_or_those_of_documents() -> None:
    mask = Mask(documents=(S - 5, 5))

    def program(ring: Ring) -> list[Any]:
        where = arguments(ring)["layout"].positions(ring.rank)
        ids = (where, torch.from_numpy(mask.position_ids(where)))
        return [call(ring, {ring.rank: lambda x, i=i: x.update(position_ids=i, mask=mask)}) for i in ids]

    for one, other in VirtualCluster(P, memory=False).run(program).results:
        assert torch.equal(one, other)


def test_the_right_call_is_taken() -> None:
    outcome = VirtualCluster(P, memory=False).run(call, {})
    assert all(isinstance(out, Tensor) for out in outcome.results)
    assert outcome.trace.bytes_sent() > 0


def test_a_ring_must_be_a_ring() -> None:
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(WorldSizeError, match="ring="):
        ring_attention(q, q, q, ring=None, layout=zigzag(4, 1))  # type: ignore[call-overload]


def call_all(ring: Ring) -> list[Any]:
    """Make each wrong call in turn, on rank 1 only, and then each call that differs between ranks."""
    kinds = [*(spoil for spoil, *_ in WRONG.values()), *DIFFERENT.values()]
    return [call(ring, {1: spoil}) for spoil in kinds]


@pytest.mark.thorough
def test_processes_refuse_the_same() -> None:
    outcome = launch(call_all, P, timeout=60)
    virtual = VirtualCluster(P, memory=False).run(call_all)
    assert outcome.trace.bytes_sent() == 0
    for rank in range(P):
        assert [(type(e), str(e)) for e in outcome.results[rank]] == [
            (type(e), str(e)) for e in virtual.results[rank]
        ]


def as_it_is(ring: Ring) -> Ring:
    return ring


def of_all(ring: Ring) -> Ring:
    return Ring(SubGroup(ring.comm, range(ring.world_size)))


def wrapped(ring: Ring) -> Ring:
    return Ring(Strict(ring.comm))


def two_calls_back(
    ring: Ring,
    order: tuple[tuple[int, int], ...],
    makes: tuple[tuple[Callable[[Ring], Ring], Callable[[Ring], Ring]], ...] = ((as_it_is, as_it_is),) * 2,
) -> list[Tensor] | RinglabError:
    """Return q's gradients of two calls of equal shapes, each over a ring that this rank makes for it.

    The backward passes run in the order that this rank has chosen.
    """
    x = arguments(ring)
    k, v = x.pop("k"), x.pop("v")
    queries = [x.pop("q"), torch.ones(1, 4, k.shape[2], 8)]
    for query in queries:
        query.requires_grad_()
    rings = [make(ring) for make in makes[ring.rank]]
    outs = [
        ring_attention(query, k, v, **(x | {"ring": each}))
        for query, each in zip(queries, rings, strict=True)
    ]
    try:
        for which in order[ring.rank]:
            outs[which].sum().backward()
    except RinglabError as error:
        return error
    return [query.grad for query in queries if query.grad is not None]


@pytest.mark.parametrize(
    "run",
    [VirtualCluster(P, memory=False).run, partial(launch, world_size=P, timeout=60)],
    ids=["virtual", "gloo"],
)
def test_ranks_that_go_back_through_different_calls_are_refused(run):
    for error in run(partial(two_calls_back, order=((0, 1), (1, 0)))).results:
        assert isinstance(error, AgreementError)
        assert "rank 0: backward through call 1 of attention" in str(error)
        assert "rank 1: backward through call 2 of attention" in str(error)


def test_any_order_is_fine_that_all_ranks_keep_to():
    found = VirtualCluster(P, memory=False).run(two_calls_back, ((1, 0), (1, 0))).results
    assert [len(gradients) for gradients in found] == [2, 2]


@pytest.mark.parametrize("make", [as_it_is, lambda ring: Ring(ring.comm), of_all, wrapped])
@pytest.mark.parametrize("other", [as_it_is, of_all, wrapped])
def test_calls_are_the_same_ones_however_a_rank_makes_its_rings(make, other):
    """One rank may keep a ring while another makes one for each call, since the transport counts the calls."""
    run = VirtualCluster(P, memory=False).run
    kept = run(two_calls_back, ((0, 1), (0, 1)), ((make, other), (as_it_is, as_it_is))).results
    assert [len(gradients) for gradients in kept] == [2, 2]
    for error in run(two_calls_back, ((0, 1), (1, 0)), ((make, other), (make, other))).results:
        assert isinstance(error, AgreementError)


def test_calls_over_some_ranks_are_counted_by_themselves():
    def names(ring):
        pair = SubGroup(ring.comm, (2, 0)) if ring.rank != 1 else None
        said = [ring.comm.name_call()] + [each.name_call() for each in (pair, pair) if each is not None]
        inner = [] if pair is None else [SubGroup(SubGroup(ring.comm, (1, 2, 0)), (1, 2)).name_call()]
        return said + inner

    first, second, third = VirtualCluster(3, memory=False).run(names).results
    assert first == third and second == first[:1] == ["call 1 of attention"]
    assert first[1:] == [f"call {number} of attention over ranks 2, 0" for number in (1, 2, 3)]


class Watched(Wrapper):
    """Keeps the device of each tensor in a control message, and of each other tensor."""

    def __init__(self, inner: Comm, control: list[str], others: list[str]) -> None:
        super().__init__(inner)
        self.control, self.others = control, others

    def exchange(self, *, send: Tensors = (), receive: Tensors = (), tag: str = "", **named: Any) -> Work:
        of = self.control if tag.startswith(CONTROL) else self.others
        of.extend(x.device.type for x in (*send, *receive))
        return self.inner.exchange(send=send, receive=receive, tag=tag, **named)


def devices_of_messages(schedule: str, *allowed: type[Exception]) -> tuple[set[str], set[str]]:
    """Return the devices of control messages and of other messages, of a call with tensors on another device.

    allowed: errors with which the call may end.
    """
    control: list[str] = []
    others: list[str] = []
    free = SimpleNamespace(seconds=lambda tiles: 0.0, of_tile=lambda tile: 0.0)
    block = ShapeBlock(SimpleNamespace(book=lambda q, backward: free), lambda seconds: None)  # type: ignore[arg-type]

    def program(ring: Ring) -> None:
        layout = zigzag(S, ring.world_size)
        with torch.device("meta"):  # as after torch.set_default_device("cuda")
            q, k, v = (torch.empty(1, 4, layout.length(ring.rank), 8, requires_grad=True) for _ in range(3))
            watched = Ring(Watched(ring.comm, control, others))
            out, _lse = ring_attention(
                q, k, v, ring=watched, layout=layout, block=block, schedule=schedule, return_lse=True
            )
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))

    # A validated call refuses tensors without data.
    with mock.patch.object(torch.Tensor, "is_meta", property(lambda x: False)), suppress(*allowed):
        VirtualCluster(4, memory=False).run(program)
    return set(control), set(others)


@pytest.mark.parametrize("schedule", schedules())
def test_ranks_compare_their_calls_on_the_cpu(schedule: str) -> None:
    """Ranks compare calls on the CPU: a message on a GPU would wait for all launched kernels, in every layer."""
    assert devices_of_messages(schedule) == ({"cpu"}, {"meta"})


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (attention, "agree", "torch.frombuffer(bytearray(message), dtype=torch.uint8)", "torch.tensor([*message], dtype=torch.uint8)"),
        (ulysses, "on_any_rank", 'device="cpu"', 'device="meta"'),
    ],
)  # fmt: skip
def test_a_comparison_on_the_gpu_would_be_noticed(owner: Any, name: str, old: str, new: str) -> None:
    with rewritten(owner, name, old, new):
        assert "meta" in devices_of_messages("ulysses", RankFailedError)[0]
