"""Which transports a machine has, and what is said of those that it has not."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from ringlab import connect, launch
from ringlab.comm.processes import transports
from ringlab.comm.processes.connect import BACKENDS
from ringlab.comm.processes.transports import TRANSPORTS, available, check
from ringlab.errors import BackendError


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool = True, peers: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)


def test_every_transport_has_a_process_group() -> None:
    assert set(available()) == set(TRANSPORTS) == set(BACKENDS)


@pytest.mark.parametrize(
    ("gpus", "missing"),
    [(0, {"nccl", "symmetric", "shared-gpu"}), (1, {"nccl", "symmetric"}), (2, set()), (8, set())],
)
def test_what_is_available(monkeypatch: pytest.MonkeyPatch, gpus: int, missing: set[str]) -> None:
    machine(monkeypatch, gpus)
    found = available()
    assert {name for name, reason in found.items() if reason} == missing
    for reason in filter(None, found.values()):
        assert reason.startswith("needs a GPU")
        assert f"found {gpus} GPU" in reason
        assert "transport='gloo'" in reason


@pytest.mark.parametrize(
    ("name", "settings", "got", "remedy"),
    [
        ("nccl", {"gpus": 0}, "0 GPUs", "use transport='gloo' with tensors on the CPU"),
        ("nccl", {"gpus": 1}, "1 GPU", "use transport='shared-gpu', or transport='gloo'"),
        ("nccl", {"gpus": 4, "nccl": False}, f"torch {torch.__version__}", "use transport='gloo'"),
        ("symmetric", {"gpus": 1}, "1 GPU", "use transport='shared-gpu', or transport='gloo'"),
        ("symmetric", {"gpus": 4, "peers": False}, "GPU 0 cannot access GPU 1", "use transport='nccl'"),
        ("smoke signals", {"gpus": 4}, "'smoke signals'", ""),
    ],
)
def test_what_cannot_run_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict, got: str, remedy: str
) -> None:
    machine(monkeypatch, **settings)
    for refuse in (lambda: check(name, 2), lambda: launch(print, 2, transport=name)):
        with pytest.raises(BackendError) as caught:
            refuse()
        assert caught.value.got.startswith(got)
        assert caught.value.remedy.startswith(remedy)
        assert name in str(caught.value)


def test_a_torch_without_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=2)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", None)
    with pytest.raises(BackendError, match="torch 2.11 or later, with symmetric memory") as caught:
        check("symmetric", 2)
    assert caught.value.remedy == "use transport='nccl'"


def test_without_any_gpu_the_cpu_takes_the_place_of_those_that_need_no_wire() -> None:
    if torch.cuda.device_count() == 0:
        check("symmetric", 4)
        check("shared-gpu", 4)
    assert transports.lack("gloo", 100) is None


def test_symmetric_memory_is_that_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(BackendError, match="all ranks on one machine") as caught, connect("symmetric"):
        pass
    assert (caught.value.got, caught.value.remedy) == ("2 of 4 ranks here", "use transport='nccl'")
    with pytest.raises(BackendError, match="a transport among"), connect(transport="smoke"):
        pass
