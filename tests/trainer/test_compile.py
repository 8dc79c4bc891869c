"""torch.compile with fullgraph=True traces a layer around attention over a ring, and changes no bit of eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringlab import Mask, VirtualCluster, attention, launch, zigzag
from ringlab.arguments import Arguments
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError
from ringlab.handles import Handled, handle_of, object_of
from ringlab.schedules import available as schedules
from ringlab.schedules.ring import RingSchedule
from ringlab.torch_modes import owned, ticket_of
from tests.trainer.compiled import PROGRAMS, Compared, answers

P = 2
ONE_GRAPH = Compared(same=True, off=0.0, graphs=1, breaks=0)


def few(found: list[tuple[bool, int]]) -> bool:
    """Return whether all results have the same bits, and at most two graphs were made for all sizes together."""
    same, graphs = zip(*found, strict=True)
    return all(same) and graphs[-1] <= 2


def on_processes(*names: str) -> list[dict[str, Any]]:
    return launch(answers, P, *names, memory=False, timeout=1500.0).results


def test_a_call_and_a_step_of_decode_compile_to_one_graph() -> None:
    """Calls and a step of decode are traced whole on two processes, and have the bits of eager calls."""
    for found in on_processes("lse", "latent", "decode"):
        assert found["lse"] == found["latent"] == ONE_GRAPH
        assert few(found["decode"])


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_processes(*PROGRAMS)


WHOLE = [
    name for name in PROGRAMS if name.startswith(("schedule ", "sinks ", "latent")) and "errors" not in name
]
WHOLE += ["layer", "model, validate", "block native", "lse", "rules", "mask", "autocast"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", WHOLE)
def test_the_same_bits_from_one_graph(name: str, ranks: list[dict[str, Any]]) -> None:
    assert [found[name] for found in ranks] == [ONE_GRAPH] * P


def exact(found: list[tuple[float, float]]) -> bool:
    """Return whether each error is at most twice that of eager plus a unit of last place, for storing the result."""
    return all(error <= 2 * of_eager + torch.finfo(torch.float32).eps for error, of_eager in found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("inductor")])
def test_inductor_is_as_exact_as_eager(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert exact(found[name]), found[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lengths", "decode", "decode_heads"])
def test_other_lengths_layouts_masks_and_caches_need_one_more_graph(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    assert all(few(found[name]) for found in ranks)


@pytest.mark.thorough
def test_checkpoints_recompute_or_keep_the_operator(ranks: list[dict[str, Any]]) -> None:
    """A checkpoint of two calls runs both forwards twice; one that keeps the operator's results runs them once."""
    for found in ranks:
        assert found["checkpoint"] == (ONE_GRAPH, 4)
        assert found["selective checkpoint"] == (ONE_GRAPH, 2)


@pytest.mark.thorough
def test_errors_are_those_of_eager_calls(ranks: list[dict[str, Any]]) -> None:
    """Ranks agree while a graph runs, so a call that is wrong on one rank raises on all ranks."""
    assert all(found["second"].startswith("GradientError") for found in ranks)
    assert all(found["differing"].startswith("AgreementError") for found in ranks)
    assert all("scale=0.5 | scale=1.0" in found["differing"] for found in ranks)
    assert [found["wrong"].split(":")[0] for found in ranks] == ["AgreementError", "ShapeError"]
    assert all(found["beside eager"].startswith("nothing") for found in ranks)
    assert all(found["seed"].startswith("MaskError") for found in ranks)
    wrong, beside = zip(*(found["latent, errors"] for found in ranks), strict=True)
    assert [text.split(":")[0] for text in wrong] == ["AgreementError", "ShapeError"]
    assert all(text.startswith("nothing") for text in beside)


@pytest.mark.thorough
def test_a_graph_takes_the_object_that_is_passed(ranks: list[dict[str, Any]]) -> None:
    assert all(found["objects"] == ["first", "second", "third"] for found in ranks)


@pytest.mark.thorough
def test_an_object_without_a_handle_ends_the_graph(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["without handle"].same and found["without handle"].breaks > 0


@pytest.mark.thorough
def test_an_object_that_is_made_inside_is_not_taken_for_another(ranks: list[dict[str, Any]]) -> None:
    assert all(found["made inside"] == [True] * 4 for found in ranks)


def let_go(found: dict[str, int]) -> bool:
    """Return whether each of three calls was kept until its backward or until its result was dropped."""
    return list(found.values()) == [0, 3, 2, 0, 0]


@pytest.mark.thorough
def test_a_call_is_kept_until_its_backward_and_no_longer(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert let_go(found["lives"])
        assert found["objects that died"] == (True, True)


@pytest.mark.thorough
def test_a_call_that_is_gone_is_named(ranks: list[dict[str, Any]]) -> None:
    assert all(found["stale"].startswith("BackendError") and "handle" in found["stale"] for found in ranks)


@pytest.mark.thorough
def test_virtual_ranks_run_graphs(ranks: list[dict[str, Any]]) -> None:
    assert all(found["virtual"] == [True, True] for found in ranks)


@pytest.mark.thorough
def test_torch_finds_no_fault_in_the_operators(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert set(found["checked"].values()) == {"SUCCESS"}, found["checked"]
        assert len(found["tags"]) == 6  # no CUDA graph contains one of them


# Handles.


def test_handles_are_different_and_never_copied() -> None:
    import copy
    import pickle

    layout = zigzag(8, 2)
    others = copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))
    assert all(other == layout and hash(other) == hash(layout) for other in others)
    assert len({one.handle for one in (layout, *others)}) == 4
    assert all(object_of(handle_of(other)) is other for other in others)
    assert handle_of(None) == handle_of("native") == 0 and object_of(0) is None


def test_a_handle_keeps_nothing_alive() -> None:
    mask = Mask(window=3)
    handle = mask.handle
    del mask
    with pytest.raises(BackendError, match=f"handle {handle}, (.|\n)*no longer exists"):
        object_of(handle)


def test_a_ticket_keeps_its_object_and_is_on_the_cpu() -> None:
    with torch.device("meta"):
        ticket = ticket_of(Handled())
    assert isinstance(object_of(int(ticket)), Handled)  # the ticket alone keeps it
    view, handle = ticket.detach(), int(ticket)
    del ticket
    assert isinstance(object_of(handle), Handled)  # so does a view
    del view
    with pytest.raises(BackendError):
        object_of(handle)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_an_operators_result_shares_no_memory(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(2.0 * 5 ** len(shape)).reshape(2, *(5,) * len(shape))
    part = whole[(0, *(slice(0, n) for n in shape))].permute(data.draw(st.permutations(range(len(shape)))))
    found = owned(part)
    assert torch.equal(found, part) and found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes


def in_graph(ring: Ring, layout: Any, *qkv: Tensor, **options: Any) -> Any:
    """Return the result of a call as a graph makes it."""
    return attention._in_graph(Arguments(**dict(zip("qkv", qkv, strict=True)), ring=ring, layout=layout, **{
        "causal": True, "mask": None, "scale": None, "softcap": None, "dropout": 0.0, "seed": None, "sinks": None,
        "block": "blockwise", "return_lse": False, "validate": False,
    } | options))  # fmt: skip


class SinksOfTheCall(RingSchedule):
    """A schedule whose backward reads the sinks of its call instead of saved ones."""

    name = "sinks of the call"

    def backward(self, call: Any, saved: Any, *given: Any) -> Any:
        return super().backward(call, (*saved[:5], call.sinks), *given)


def gradients(ring: Ring, schedule: Any, spoilt: bool) -> tuple[Tensor, ...]:
    """Return the gradients of a call in a graph that keeps copies of its tensors.

    spoilt: whether the tensors themselves are overwritten before backward, as the compiler may do.
    """
    random = torch.Generator().manual_seed(ring.rank)
    leaves = [torch.randn(1, 4, 8, 8, generator=random) for _ in range(3)] + [torch.linspace(-1, 1, 4)]
    *qkv, sinks = (x.requires_grad_() for x in leaves)
    copied = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.detach().clone() if x.is_floating_point() else x, lambda x: x
    )
    with copied:
        out = in_graph(ring, zigzag(16, 2), *qkv, sinks=sinks, schedule=schedule)
    for x in (*leaves, out) if spoilt else ():
        x.data.fill_(torch.nan)
    return torch.autograd.grad(out, leaves, torch.ones(1, 4, 8, 8))


def differ(schedule: Any) -> bool:
    """Return whether gradients change if the graph's tensors are overwritten."""
    right, found = (
        VirtualCluster(2, memory=False).run(gradients, schedule, spoilt).results for spoilt in (False, True)
    )
    return not all(
        torch.equal(x, y) for a, b in zip(right, found, strict=True) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("schedule", [*schedules(), SinksOfTheCall()], ids=lambda x: getattr(x, "name", x))
def test_a_call_keeps_no_memory_of_the_graphs_tensors(schedule: Any) -> None:
    assert not differ(schedule)


@pytest.mark.parametrize("schedule", ["ring", "allgather"])
def test_a_graph_saves_the_tensors_that_backward_needs(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph saves all tensors that a forward keeps, except lse, because the compiler may overwrite their aliases."""
    kept: list[Any] = []
    monkeypatch.setattr(attention, "ticket_of", lambda each: kept.append(each.saved) or ticket_of(each))

    def call(ring: Ring) -> None:
        qkv = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
        in_graph(ring, zigzag(16, 1), *qkv, schedule=schedule)

    VirtualCluster(1).run(call)
    assert [x for x in kept[0] if isinstance(x, int)] == [1, 2, 3, 0]
    assert [tuple(x.shape) for x in kept[0] if not isinstance(x, int)] == [(1, 2, 16)]
