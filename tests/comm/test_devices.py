"""Under every launcher each process takes a GPU of its own, or is refused.

No GPU is needed: the tests replace the answers of torch.cuda and the environment.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringlab import launch
from ringlab.comm.processes import connect as connecting
from ringlab.comm.processes import devices
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, WorldSizeError
from tests.blocks.device_calls import rewritten

RANK, RANKS, PER_NODE = 13, 16, 8
NCCL_OPTIONS = SimpleNamespace(
    Options=lambda is_high_priority_stream: SimpleNamespace(high=is_high_priority_stream)
)


class Taken(Exception):
    """Raised in place of opening the group, so that the call ends. device: the GPU that the process has taken, if any."""

    def __init__(self, device: int | None, options: Any = None) -> None:
        super().__init__(device)
        self.device, self.options = device, options


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Taken]:
    """Return a function that connects rank 13 of 16 on two machines, and returns the GPU that the rank takes."""

    def connected(transport: str, gpus: int, **environment: int) -> Taken:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        address = {"RANK": RANK, "WORLD_SIZE": RANKS, "MASTER_ADDR": "node0", "MASTER_PORT": 1}
        for name, value in (address | environment).items():
            monkeypatch.setenv(name, str(value))
        store, taken = dist.HashStore(), Taken(None)
        for rank in range(RANKS):
            store.set(f"ringlab/connect/0/come/{rank}", f"node{rank // PER_NODE}")

        def stop(*_: Any, pg_options: Any = None, **__: Any) -> None:
            taken.options = pg_options
            raise taken

        monkeypatch.setattr(connecting, "_uses", defaultdict(itertools.count))
        monkeypatch.setattr(connecting, "torchrun_store", lambda startup: store)
        monkeypatch.setattr(connecting.socket, "gethostname", lambda: f"node{RANK // PER_NODE}")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(taken, "device", device))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL_OPTIONS, raising=False)
        monkeypatch.setattr(dist, "init_process_group", stop)
        with pytest.raises(Taken) as caught, connecting.connect(transport, timeout=7.0):
            pass
        return caught.value

    return connected


TORCHRUN = {"LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8}
ACCEPTED = [
    pytest.param("nccl", 8, TORCHRUN, 5, id="torchrun"),
    pytest.param("nccl", 1, TORCHRUN, 0, id="SLURM, one visible GPU a task"),
    pytest.param("nccl", 8, {"LOCAL_RANK": 5}, 5, id="no LOCAL_WORLD_SIZE"),
    pytest.param("nccl", 1, {"LOCAL_RANK": 5}, 0, id="no LOCAL_WORLD_SIZE, one visible GPU"),
    pytest.param("nccl", 8, {}, 5, id="neither"),
    pytest.param("nccl", 6, {"LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8}, 5, id="fewer GPUs than ranks"),
    pytest.param("shared-gpu", 2, {"LOCAL_RANK": 5}, 1, id="shared on purpose"),
    pytest.param("gloo", 1, {"LOCAL_RANK": 5}, None, id="gloo"),
]


@pytest.mark.parametrize("transport, gpus, environment, device", ACCEPTED)
def test_a_process_takes_its_gpu(
    transport: str, gpus: int, environment: dict[str, int], device: int | None, take: Callable[..., Taken]
) -> None:
    assert take(transport, gpus, **environment).device == device


@pytest.mark.parametrize(
    "transport, gpus, environment, got",
    [
        ("nccl", 4, TORCHRUN, "4 GPUs"),
        ("nccl", 2, {}, "2 GPUs"),
        ("nccl", 0, TORCHRUN, "0 GPUs"),
        ("symmetric", 8, {"LOCAL_RANK": 5}, "8 of 16 ranks here"),
    ],
)
def test_a_process_without_a_gpu_is_refused(
    transport: str, gpus: int, environment: dict[str, int], got: str, take: Callable[..., Taken]
) -> None:
    with pytest.raises(BackendError) as caught:
        take(transport, gpus, **environment)
    assert caught.value.got == got
    assert not gpus or transport == "symmetric" or "SLURM_LOCALID" in caught.value.remedy


@pytest.mark.parametrize("of_slurm", [True, False])
def test_outside_torchrun_the_remedy_is_the_launchers(
    of_slurm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if of_slurm:
        monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(WorldSizeError) as caught, connecting.connect("gloo"):
        pass
    assert ("RANK=$SLURM_PROCID" in caught.value.remedy) == of_slurm


def test_nccl_runs_on_streams_of_high_priority(take: Callable[..., Taken]) -> None:
    options = take("nccl", 8, **TORCHRUN).options
    assert options.high is True and options._timeout == timedelta(seconds=7)
    assert take("gloo", 8, **TORCHRUN).options is None


MUTANTS = {
    "counts all ranks": (devices, "device_of", "if gpus == 1:", "if False:", "SLURM, one visible GPU a task"),
    "takes GPU 0": (connecting, "connect", "neighbours.index(rank)", "0", "neither"),
    "counts over machines": (connecting, "connect", "if host == hosts[rank]", "", "neither"),
    "wraps around": (connecting, "join", "device_of(local_rank)", "local_rank % 4", "torchrun"),
    "asks a GPU for each": (
        connecting, "_check_here", '1 if transport == "nccl" else here', "here", "no LOCAL_WORLD_SIZE, one visible GPU",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mistake_is_noticed(
    name: str, take: Callable[..., Taken], monkeypatch: pytest.MonkeyPatch
) -> None:
    *change, setup = MUTANTS[name]
    [(transport, gpus, environment, device)] = [case.values for case in ACCEPTED if case.id == setup]
    with rewritten(*change):
        monkeypatch.setattr(connecting, "device_of", devices.device_of)
        try:
            found = take(transport, gpus, **environment).device
        except BackendError:
            found = "refused"
    assert found != device


def gpus_compared(ring: Ring, gpu_of_rank: str) -> str:
    """Return the error about ranks that share a GPU, or "". Rank r has the GPU called `gpu_of_rank[r]`."""
    torch.cuda.current_device = lambda: ring.rank
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"{gpu_of_rank[device]}-id")
    try:
        devices.check_own_gpus("nccl")
    except BackendError as error:
        return f"{error.got}. {error.remedy}"
    return ""


def test_ranks_that_share_a_gpu_are_found_by_its_identifier() -> None:
    assert launch(gpus_compared, 4, "abcd", memory=False).results == [""] * 4
    found = launch(gpus_compared, 4, "abba", memory=False).results
    assert len(set(found)) == 1 and found[0].startswith("ranks 0, 3 on GPU-a-id; ranks 1, 2 on GPU-b-id. ")
    assert "transport='shared-gpu'" in found[0]


def test_ranks_that_share_a_gpu_may_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are compared after the group is open and before NCCL's first operation; the group is closed again."""
    calls: list[str] = []

    def shared(transport: str) -> None:
        calls.append("compared")
        raise BackendError("a GPU of its own", "ranks 0, 1 on one")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL_OPTIONS, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: calls.append("opened"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("closed"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: calls.append("NCCL"))
    monkeypatch.setattr(connecting, "check_own_gpus", shared)
    with pytest.raises(BackendError, match="a GPU of its own"):
        connecting.join("nccl", 5.0, 5.0, dist.HashStore(), 0, 2, 0)
    assert calls == ["opened", "compared", "closed"]
