"""Each check of preflight finds the fault that a test makes for it, and all ranks report the same."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import LabError
from ringlab_course.lab import preflight as looked_at
from ringlab_course.lab.preflight import (
    Finding,
    exchange_works,
    expect_ready,
    judge,
    preflight,
)

CPU = torch.device("cpu")


def healthy(P: int = 4) -> list[dict[str, Any]]:
    """Return the facts that ranks on two machines with GPUs gather if nothing is wrong."""
    return [
        {
            "rank": rank, "host": f"node{rank // 2}", "kind": "cuda", "device": "a GPU", "id": f"GPU-{rank}",
            "versions": {"torch": "2.13.0", "nccl": "2.27"}, "settings": {"S": 8192}, "free_bytes": 70 * 2**30,
            "load": 0.1, "cores": 4, "in_use": 0.01, "smi": {"utilization.gpu": "0 %"},
        }
        for rank in range(P)
    ]  # fmt: skip


def failing(facts: list[dict[str, Any]], nodes: int | None = 2) -> dict[str, Finding]:
    return {each.name: each for each in judge(facts, 40 * 2**30, nodes) if not each.ok}


def test_nothing_is_found_where_all_is_well() -> None:
    assert failing(healthy()) == {}
    found = list(judge(healthy(), 0, None))
    assert len(found) == 6
    expect_ready(found)


@pytest.mark.parametrize(
    ("change", "found", "told"),
    [
        ({"versions": {"torch": "2.12.0", "nccl": "2.27"}}, "same versions", "rank 2 (node1): torch 2.12.0, rank 0: 2.13.0"),
        ({"needed_bytes": 71 * 2**30}, "memory", "rank 2 has the least free: 70.0 GiB; 71.0 GiB are needed"),
        ({"settings": {"S": 4096}}, "same settings", "S 4096, rank 0: 8192"),
        ({"id": "GPU-3"}, "a device each", "GPU-3"),
        ({"free_bytes": 2**30}, "memory", "rank 2 has the least free: 1.0 GiB; 40.0 GiB are needed"),
        ({"smi": {"utilization.gpu": "37 %"}}, "nobody else", "37 % of its time"),
        ({"host": "node2"}, "machines", "2 on node0, 1 on node1, 1 on node2"),
    ],
)  # fmt: skip
def test_each_fault_of_one_rank_is_found_and_nothing_else(
    change: dict[str, Any], found: str, told: str
) -> None:
    facts = copy.deepcopy(healthy())
    facts[2].update(change)
    wrong = failing(facts)
    assert list(wrong) == [found]
    assert told in wrong[found].told and wrong[found].remedy
    with pytest.raises(LabError, match=found):
        expect_ready(list(wrong.values()))


def test_a_busy_device_may_be_allowed_and_nothing_else() -> None:
    facts = healthy()
    facts[1]["in_use"] = 0.9
    expect_ready(list(failing(facts).values()), allow_busy=True)
    facts[1]["settings"] = {}
    with pytest.raises(LabError, match="same settings"):
        expect_ready(list(failing(facts).values()), allow_busy=True)


def test_a_loaded_machine_is_doubtful_but_not_refused() -> None:
    facts = [{**each, "kind": "cpu", "load": 13.0} for each in healthy()]
    (found,) = [each for each in judge(facts, 0, None) if each.name == "nobody else"]
    assert found.ok and found.doubtful and "load 13.0" in found.told and found.remedy
    assert not any(each.doubtful for each in judge(healthy(), 0, None))


def test_more_ranks_than_cores_are_doubtful_but_not_refused() -> None:
    facts = [{**each, "kind": "cpu", "host": "here", "cores": 2} for each in healthy()]
    (found,) = [each for each in judge(facts, 0, None) if each.name == "a device each"]
    assert found.ok and found.doubtful and found.remedy == "--ranks at most the number of cores"
    assert found.told == "4 ranks share 2 cores of here: exchanges wait for a core"
    assert not any(each.doubtful for each in judge(facts[:2], 0, None))


class Crossed(Ring):
    """A ring in which rank 1 receives a changed number, as over a faulty link."""

    def shift(self, *tensors: torch.Tensor, **options: Any) -> Any:
        got = super().shift(*tensors, **options)
        if self.rank == 1:
            got[7] += 1.0
        return got


def test_a_link_that_changes_numbers_is_found_on_every_rank() -> None:
    def program(ring: Ring) -> list[Finding]:
        own = Crossed(ring.comm)
        assert exchange_works(ring, CPU).ok
        return preflight(own, {"S": 1}, CPU)[1]

    for found in VirtualCluster(3).run(program).results:
        wrong = [each for each in found if not each.ok]
        assert [each.name for each in wrong] == ["exchange"]
        assert wrong[0].told == "rank 1: wrong numbers arrive"


def test_another_setting_on_one_rank_ends_all_of_them_before_anything_is_measured() -> None:
    def program(ring: Ring) -> str:
        settings = {"S": 8192 if ring.rank else 4096}
        with pytest.raises(LabError, match="same settings") as raised:
            expect_ready(preflight(ring, settings, CPU)[1])
        return str(raised.value)

    told = VirtualCluster(3).run(program).results
    assert len(set(told)) == 1 and "rank 1" in told[0]


def test_ranks_that_share_a_gpu_may_and_what_they_need_is_added_up() -> None:
    facts = healthy(2)
    facts[1]["id"], facts[1]["in_use"] = facts[0]["id"], 0.2
    assert {each.name for each in judge(facts, 40 * 2**30, None, shared=True) if not each.ok} == {"memory"}
    found = {each.name: each for each in judge(facts, 30 * 2**30, None, shared=True)}
    assert (
        all(each.ok for each in found.values()) and "GPU-0, which ranks share" in found["a device each"].told
    )
    assert {each.name for each in judge(facts, 0, None) if not each.ok} == {"a device each", "nobody else"}


def test_processes_of_one_machine_need_its_memory_together() -> None:
    facts = [each | {"kind": "cpu", "host": "here", "needed_bytes": 18 * 2**30} for each in healthy()]
    (wrong,) = failing(facts, 1).values()
    assert wrong.told == "ranks 0, 1, 2, 3 have together the least free: 70.0 GiB; 72.0 GiB are needed"
    assert not failing([each | {"needed_bytes": 17 * 2**30} for each in facts], 1)


def test_a_gpu_is_looked_at_when_the_start_of_nccl_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi reports the last second, so it is called when this run has not used the GPU for a second."""
    steps: list[str] = []
    properties = SimpleNamespace(name="made up", uuid="0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append("done"))
    monkeypatch.setattr(looked_at.time, "sleep", lambda seconds: steps.append(f"{seconds > 1}"))
    monkeypatch.setattr(looked_at, "nvidia_smi", lambda gpu: steps.append("asked") or {})
    looked_at._of_gpu(torch.device("cuda"))
    assert steps == ["done", "True", "asked"]
