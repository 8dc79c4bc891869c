"""The formulas for a pipeline's bubble and memory agree with a schedule that is followed task by task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost.models import model, model_names
from ringlab.cost.planner import Request, plan
from ringlab.cost.planner.stages import chunks_held, largest_layers, stages
from ringlab.cost.planner.step_time import Pass, Pipeline, StepTime

some_model = st.sampled_from(model_names()).map(model)
Task = tuple[str, int, int]
"""A forward or a backward of one micro-batch and one chunk."""


def order(stage: int, pp: int, interleave: int, micro_batches: int) -> Iterator[Task]:
    """Yield the tasks of one stage: some forwards, then forwards and backwards in turn, then backwards.

    Chunks take turns after every pp micro-batches. Source: arXiv 2104.04473, figure 4.
    """
    tasks = interleave * micro_batches
    before = pp - 1 - stage if interleave == 1 else 2 * (pp - 1 - stage) + (interleave - 1) * pp
    before = min(before, tasks)

    def task(kind: str, number: int) -> Task:
        group, rest = divmod(number, pp * interleave)
        chunk = rest // pp if interleave > 1 else 0
        micro_batch = group * pp + rest % pp if interleave > 1 else number
        return kind, micro_batch, chunk if kind == "forward" else interleave - 1 - chunk

    for number in range(before):
        yield task("forward", number)
    for number in range(tasks - before):
        yield task("forward", before + number)
        yield task("backward", number)
    for number in range(tasks - before, tasks):
        yield task("backward", number)


def before_it(task: Task, stage: int, pp: int, interleave: int) -> tuple[int, Task] | None:
    """Return the stage and the task whose result `task` waits for, or None."""
    kind, micro_batch, chunk = task
    if kind == "forward":
        if stage > 0:
            return stage - 1, task
        return (pp - 1, (kind, micro_batch, chunk - 1)) if chunk > 0 else None
    if stage < pp - 1:
        return stage + 1, task
    if chunk < interleave - 1:
        return 0, (kind, micro_batch, chunk + 1)
    return stage, ("forward", micro_batch, chunk)


def followed(
    pp: int, interleave: int, micro_batches: int, forward: int, backward: int
) -> tuple[int, list[int]]:
    """Return the makespan, and the largest number of chunks that each stage holds. All chunks take equally long."""
    queues = [list(order(stage, pp, interleave, micro_batches)) for stage in range(pp)]
    done: dict[tuple[int, Task], int] = {}
    now, held, most = [0] * pp, [0] * pp, [0] * pp
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                needed = before_it(queue[0], stage, pp, interleave)
                if needed is not None and needed not in done:
                    break
                task = queue.pop(0)
                start = max(now[stage], done[needed] if needed is not None else 0)
                now[stage] = done[stage, task] = start + (forward if task[0] == "forward" else backward)
                held[stage] += 1 if task[0] == "forward" else -1
                most[stage], moved = max(most[stage], held[stage]), True
        assert moved, "the schedule waits for itself"
    return max(now), most


def formula(pp: int, interleave: int, micro_batches: int, forward: int, backward: int) -> float:
    """Return the makespan of the same schedule by `StepTime`, with one layer in each chunk."""
    nothing = {name: 0.0 for name in Pass.__dataclass_fields__ if name.endswith("_s")}
    passes = tuple(
        Pass(name, **nothing | {"linear_s": seconds})
        for name, seconds in (("forward", forward), ("backward", backward))
    )
    pipeline = Pipeline(pp, interleave, interleave, 0.0)
    return StepTime(interleave, passes, 0.0, 0.0, micro_batches, pipeline).total_s


cases = st.tuples(
    st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)
)


@given(cases)
def test_the_bubble_and_what_is_held_are_those_of_the_schedule(case: tuple[int, int, int, int, int]) -> None:
    """The formulas give the schedule's makespan and its held chunks, for every kind of pipeline."""
    pp, interleave, groups, forward, backward = case
    micro_batches = groups * pp if interleave > 1 else groups
    makespan, most = followed(pp, interleave, micro_batches, forward, backward)
    assert makespan == pytest.approx(formula(pp, interleave, micro_batches, forward, backward))
    assert most == [chunks_held(stage, pp, interleave, micro_batches) for stage in range(pp)]


@given(some_model, st.integers(1, 16))
def test_stages_share_out_the_model(it, pp: int) -> None:  # type: ignore[no-untyped-def]
    """The stages together have all layers and weights; a tied embedding is on the first and on the last."""
    pp = min(pp, it.layers)
    found = {stage.name: stage for stage in stages(it, pp)}
    if pp == 1:
        assert found[""].parameters == it.parameters
        return
    first, last = found["first"], found["last"]
    rest = it.layers - first.layers - last.layers
    assert last.layers <= first.layers <= last.layers + 1 and (pp > 2 or rest == 0)
    if pp > 2:
        fullest = found["second"].layers
        assert largest_layers(stages(it, pp)) == fullest == -(-it.layers // pp)
        assert rest <= (pp - 2) * fullest
    middle = -(-rest * it.matrix_parameters // it.layers) + rest * 2 * it.d_model
    copy = it.vocabulary * it.d_model if it.tied_embeddings else 0
    more = first.parameters + middle + last.parameters - it.parameters - copy
    assert (
        more == 0 if len(it.kinds) == 1 else 0 <= more <= 4
    )  # shares of kinds and of their experts are rounded up


def pipelined(**changes: object) -> Request:
    asked = {"tp": 1, "cp": 1, "dp": 1, "pp": 8, "batch": 16, "recomputation": "full"} | changes
    return Request("llama3-8b", 8192, "h100", **asked)  # type: ignore[arg-type]


def test_the_last_stage_needs_most_where_its_logits_do() -> None:
    wide = replace(model("llama3-8b"), name="wide", vocabulary=10**6)
    found = plan(pipelined().but(model=wide)).best.memory
    assert found.of("logits") == 8192 * 10**6 * 14 and found.of("activations") == 4 * 8192 * 4096 * 2
    pieces = plan(pipelined(logits_chunk=64)).best.memory
    assert pieces.of("logits") == 0 and pieces.of("activations") == 8 * 4 * 8192 * 4096 * 2


def test_the_host_holds_what_the_stage_does_that_offloads_most() -> None:
    """Host memory is counted for the stage that offloads most, here the first of the pipeline."""
    found = plan(pipelined(offload="activations")).best.memory
    a_layer = 8192 * 4096 * 2
    assert found.of("logits") > 0 and found.of("activations") == 2 * a_layer
    assert found.host_bytes == (8 * 4 - 2) * a_layer
