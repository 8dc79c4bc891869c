"""Plans obey laws: more tokens never shorten a step, and faster links never lengthen it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.models import model
from ringlab.cost.planner import Request, plan
from ringlab.cost.planner.search import Candidate, fastest, leanest, search
from ringlab.errors import CostError

pytestmark = pytest.mark.thorough

NAMES = st.sampled_from(
    ["llama3-8b", "llama3-70b", "llama2-7b", "qwen2.5-7b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma3-27b", "qwen3-next-80b-a3b"]
)  # fmt: skip
MACHINES = st.sampled_from(["a100", "h100", "b200"])
PURPOSES = st.sampled_from(["training", "prefill", "decode", "serve"])
LAYOUTS = st.sampled_from([None, "zigzag", "striped", "contiguous"])


@st.composite
def requests(draw: st.DrawFn, training: bool = False) -> Request:
    """Return a request without degrees, with a context of any length from 4k to 4M tokens."""
    purpose = "training" if training else draw(PURPOSES)
    machine = draw(MACHINES)
    offloads = (
        ["none", "none", "activations"] if purpose == "training" and hardware(machine).host else ["none"]
    )
    name = draw(NAMES)
    states = any(kind.linear for kind in model(name).kinds)  # the striped layout cannot pass states
    return Request(
        name,
        draw(st.one_of(st.integers(4096, 2**22), st.integers(12, 22).map(lambda n: 2**n))),
        machine,
        nodes=draw(st.sampled_from([1, 2, 3, 4, 8, 12])),
        batch=draw(st.sampled_from([1, 1, 2, 8])),
        purpose=purpose,
        causal=purpose == "serve" or draw(st.booleans()),
        layout=draw(LAYOUTS.filter(lambda layout: not (states and layout == "striped"))),
        offload=draw(st.sampled_from(offloads)),
    )


def possible(request: Request) -> bool:
    try:
        search(request)
    except CostError:
        return False
    return True


def least_memory(request: Request) -> Candidate:
    return min(leanest(request), key=lambda it: it.memory.total_bytes)


@given(requests(), st.integers(2, 5))
@settings(max_examples=50)
def test_more_nodes_never_make_the_memory_of_a_gpu_larger(request: Request, times: int) -> None:
    # The number of ranks must divide the number of heads.
    assume(request.purpose != "serve" or times in (2, 4))
    more = request.but(nodes=times * request.nodes)
    assume(possible(more))
    assert least_memory(more).memory.total_bytes <= least_memory(request).memory.total_bytes


@given(requests(), st.integers(1, 5000), st.integers(4096, 12_000))
@settings(max_examples=50)
def test_more_tokens_never_make_a_step_shorter_nor_memory_smaller(
    request: Request, more: int, S: int
) -> None:
    """More tokens never make a step shorter or memory smaller, if work is counted pair by pair."""
    shorter, longer = (request.but(tokens=tokens, tile=(1, 1)) for tokens in (S, S + more))
    assert fastest(longer).step_s >= fastest(shorter).step_s * (1 - 1e-9)
    assert least_memory(longer).memory.total_bytes >= least_memory(shorter).memory.total_bytes


def faster_links(machine: Hardware, inside: float, between: float) -> Hardware:
    links = {
        "inside": replace(machine.inside, bytes_per_s=machine.inside.bytes_per_s * inside),
        "between": replace(machine.between, bytes_per_s=machine.between.bytes_per_s * between),
    }
    return replace(machine, **links)


@given(requests(), st.floats(1, 100), st.floats(1, 100))
def test_faster_links_are_never_slower(request: Request, inside: float, between: float) -> None:
    faster = request.but(hardware=faster_links(request.machine, inside, between))
    before, after = search(request), search(faster)
    assert before[0].fits == after[0].fits  # memory does not depend on links
    assert fastest(faster).step_s <= fastest(request).step_s * (1 + 1e-9)


@given(requests())
@settings(max_examples=50)
def test_every_candidate_adds_up(request: Request) -> None:
    """Degrees multiply to the GPUs, entries add up to the total, and the best candidate comes first."""
    found = search(request)
    for it in found:
        degrees = it.degrees
        assert degrees.dp * degrees.tp * degrees.ring * degrees.ulysses == request.gpus
        assert (degrees.dp * degrees.cp) % degrees.fsdp == 0 and request.batch % degrees.dp == 0
        assert it.memory.total_bytes == sum(entry.bytes for entry in it.memory.entries)
        assert all(entry.bytes > 0 for entry in it.memory.entries)
        assert 0 <= it.time.exposed_s <= it.step_s and it.time.imbalance_s >= -1e-9 * it.step_s
    fitting = [it for it in found if it.fits]
    assert list(found[: len(fitting)]) == fitting
    assert all(fitting[0].step_s <= it.step_s for it in fitting[1:])
    if fitting:
        assert fastest(request).step_s <= fitting[0].step_s * (1 + 1e-9) or request.layout is None


@given(requests())
@settings(max_examples=20)
def test_every_suggestion_fits(request: Request) -> None:
    for each in plan(request).suggestions:
        assert plan(each.request).fits, each.sentence


@pytest.mark.parametrize(
    "request_",
    [
        Request("llama3-70b", 10**6, "h100", nodes=4),
        Request("llama3-70b", 10**6, "h100", nodes=8, batch=2),
        Request("llama3-8b", 64_000, "a100", nodes=8, tp=1, ulysses=1, tile=(64, 128), reserve=0.1),
        Request("llama3-70b", 10**6, "h100", purpose="decode", batch=4),
        Request("llama3-70b", 10**6, "h100", nodes=4, purpose="serve", batch=4, generated=3000, chunk=4096),
        Request("llama3-8b", 10**6, "h100", purpose="serve", batch=4, sharing="helix", tp=2, cp=4),
        Request("llama3-70b", 2**20 + 1, "h100", causal=False, purpose="prefill", layout="contiguous"),
        Request(
            "llama3-8b", 2**17, "h100", nodes=2, batch=8, pp=4, interleave=2, dp=1, offload="activations"
        ),
    ],
    ids=[
        "does not fit",
        "fits",
        "pinned",
        "decode",
        "serve",
        "serve pinned",
        "unmasked",
        "pipeline, offload",
    ],
)
def test_the_command_of_every_suggestion_gives_what_it_says(request_: Request) -> None:
    """The command of a suggestion, typed as printed, fits and takes the time that was reported."""
    found = plan(request_).suggestions
    assert found
    for each in (*found, None):
        asked = request_ if each is None else each.request
        told = CliRunner().invoke(app, [*shlex.split(asked.command())[1:], "--json"])
        again = json.loads(told.stdout)
        if each is None:
            assert again["step_s"] == plan(request_).best.step_s
        else:
            assert told.exit_code == 0 and again["fits"]
            assert (again["step_s"], again["memory"]["total_bytes"]) == (
                each.best.step_s,
                each.best.memory.total_bytes,
            )


REFUSERS = {f"ringlab.cost.planner.{name}" for name in ("request", "parallelism", "search")}
"""The modules that refuse requests. An error from elsewhere is a plan that went wrong."""
DEGREE_OPTIONS = ("dp", "fsdp", "tp", "cp", "ring", "ulysses", "pp", "interleave", "ep")


def degrees_asked() -> Iterator[dict[str, int]]:
    """Yield every degree alone, and every pair of degrees."""
    yield {}
    for name in DEGREE_OPTIONS:
        yield from ({name: degree} for degree in (1, 2, 3, 8, 64, 4096))
    for one, other in combinations(DEGREE_OPTIONS, 2):
        yield from ({one: a, other: b} for a, b in ((2, 2), (2, 8), (8, 2), (8, 16), (64, 3)))


def refusal(**asked: Any) -> CostError | None:
    """Return the error of a refused request, which must name a remedy, or None if the request is planned."""
    try:
        search(Request(**asked))
    except CostError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None
        assert trace.tb_frame.f_globals["__name__"] in REFUSERS, (asked, str(error))
        assert error.needed and error.got and error.remedy, (asked, str(error))
        return error
    return None


@pytest.mark.parametrize("purpose", ["training", "prefill", "decode", "serve"])
@pytest.mark.parametrize(
    "name",
    ["llama3-8b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b"],
)  # fmt: skip
def test_every_setting_of_degrees_is_planned_or_refused_with_a_remedy(name: str, purpose: str) -> None:
    planned, commands = 0, set()
    for nodes, batch, tokens in ((3, 1, 131072), (32, 8, 192)):
        for number, degrees in enumerate(degrees_asked()):
            asked = {"model": name, "tokens": tokens, "hardware": "h100", "nodes": nodes, "batch": batch}
            asked |= {"purpose": purpose, **degrees}
            error = refusal(**asked)
            if error is not None:
                commands |= {error.remedy.partition("ringlab ")[2]} - {""}
                continue
            planned += 1
            if number % 120 == 0:
                assert plan(Request(**asked)).as_dict()["answer"]
    assert planned > 20
    for command in sorted(commands):  # suggested commands are themselves accepted
        answer = CliRunner().invoke(app, [*shlex.split(command), "--json"])
        assert "error" not in json.loads(answer.stdout), command
