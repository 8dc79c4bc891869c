"""Each check of preflight finds the fault that a test makes for it, and all ranks report the same."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.bench.device import source
from ringlab.comm.ring import Ring
from ringlab.errors import LabError
from ringlab_course.lab import preflight as looked_at
from ringlab_course.lab.l1 import L1, Queued
from ringlab_course.lab.l2 import L2
from ringlab_course.lab.preflight import (
    Finding,
    exchange_works,
    expect_ready,
    free_bytes,
    judge,
    preflight,
    versions,
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


def test_cpus_that_others_use_are_told_and_refuse_nothing() -> None:
    on_cpus = [each | {"kind": "cpu", "load": 1.5 + each["rank"], "cores": 4} for each in healthy()]
    (quiet,) = (each for each in judge(on_cpus, 0, None) if each.name == "nobody else")
    assert (
        quiet.ok
        and quiet.told
        == "over the last minute load 4.5 on 4 cores of node1: what is measured beside that says little"
    )
    on_cpus[3]["load"] = 4.0
    (quiet,) = (each for each in judge(on_cpus, 0, None) if each.name == "nobody else")
    assert quiet.ok and quiet.told == "no device is in use"


@pytest.mark.parametrize(
    ("change", "found", "told"),
    [
        ({"versions": {"torch": "2.12.0", "nccl": "2.27"}}, "same versions", "rank 2 (node1): torch 2.12.0, rank 0: 2.13.0"),
        ({"versions": {"torch": "2.13.0", "nccl": "2.27", "source": "abc"}}, "same versions", "source abc, rank 0: None"),
        ({"needed_bytes": 71 * 2**30}, "memory", "rank 2 has the least free: 70.0 GiB; 71.0 GiB are needed"),
        ({"versions": {"torch": "2.13.0"}}, "same versions", "nccl None"),
        ({"settings": {"S": 4096}}, "same settings", "S 4096, rank 0: 8192"),
        ({"id": "GPU-3"}, "a device each", "GPU-3"),
        ({"free_bytes": 2**30}, "memory", "rank 2 has the least free: 1.0 GiB; 40.0 GiB are needed"),
        ({"smi": {"utilization.gpu": "37 %"}}, "nobody else", "37 % of its time"),
        ({"in_use": 0.5}, "nobody else", "50% of its memory"),
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


def test_a_node_that_is_missing_is_found() -> None:
    assert "2 on node0" in failing(healthy(2))["machines"].told


def test_a_busy_device_may_be_allowed_and_nothing_else() -> None:
    facts = healthy()
    facts[1]["in_use"] = 0.9
    expect_ready(list(failing(facts).values()), allow_busy=True)
    facts[1]["settings"] = {}
    with pytest.raises(LabError, match="same settings"):
        expect_ready(list(failing(facts).values()), allow_busy=True)


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


def test_what_a_lab_allocates_grows_with_its_lengths() -> None:
    assert L2(S=2**20).needed_bytes(2) > 8 * L2(S=2**16).needed_bytes(2)


def test_lab_l1_needs_two_buffers_for_each_message_and_other_work_on_a_gpu_alone() -> None:
    one, more = L1(messages=(1, 2**30)), L1(messages=(1, 2**30, 2**29))
    assert more.needed_bytes(2) - one.needed_bytes(2) == 2**30
    assert one.needed_bytes(2, 0, torch.device("cuda")) - one.needed_bytes(2) == Queued.OTHER_BYTES
    assert 2**31 < one.needed_bytes(2) < 2**31 + 2**28


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


def test_a_page_cache_is_no_memory_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "meminfo"
    said.write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    7 kB\n")
    monkeypatch.setattr(looked_at, "Path", lambda name: {"/proc/meminfo": said}[name])
    assert free_bytes(CPU) == 7 * 1024


def test_another_checkout_is_another_version_and_the_remedy_says_so() -> None:
    facts = healthy()
    facts[3]["versions"] = {**facts[0]["versions"], "source": "another"}
    assert "the same checkout of ringlab" in failing(facts)["same versions"].remedy
    assert versions()["source"] == source() and len(source()) == 12


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
