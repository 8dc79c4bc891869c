"""The clock and the description of a GPU, with stand-ins for what a machine without one lacks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringlab.bench import device as device_module
from ringlab.bench.device import FLUSHES, Cuda, fill_with_nan, new_memory_is_nan
from ringlab.bench.machine import machine

GPU = SimpleNamespace(
    name="A GPU that nobody built", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
    L2_cache_size=50 * 2**20, uuid="1234",
)  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been asked of a GPU, in order."""
    asked: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.number = asked.count("event")
            asked.append("event")

        def record(self) -> None:
            asked.append(f"record {self.number}")

        def synchronize(self) -> None:
            asked.append(f"synchronize {self.number}")

        def elapsed_time(self, end: Any) -> float:
            asked.append(f"elapsed {self.number} {end.number}")
            return 2500.0  # milliseconds

    fakes = {
        "is_available": lambda: True,
        "get_device_properties": lambda *_: GPU,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: GPU.name,
        "synchronize": lambda: asked.append("synchronize"),
        "Event": Event,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    empty = torch.empty
    monkeypatch.setattr(device_module.torch, "empty", lambda *a, **k: empty(*a, **{**k, "device": "cpu"}))
    return asked


def test_a_run_is_timed_between_two_events_and_in_seconds(log: list[str]) -> None:
    assert Cuda().seconds(lambda: log.append("run")) == 2.5
    assert log == ["event", "event", "record 0", "run", "record 1", "synchronize 1", "elapsed 0 1"]


def test_settling_overwrites_twice_the_l2_after_waiting_for_what_went_before(log: list[str]) -> None:
    cuda = Cuda()
    assert cuda._buffer.nbytes >= 2 * GPU.L2_cache_size
    cuda._buffer = SimpleNamespace(zero_=lambda: log.append("zero"))  # type: ignore[assignment]
    cuda.settle()
    assert log == ["synchronize"] + ["zero"] * FLUSHES


def test_a_peak_is_counted_from_what_was_there_before(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 175)
    assert Cuda().peak_bytes(lambda: log.append("run")) == 75
    assert log == ["synchronize", "reset", "run", "synchronize"]


def test_the_description_of_a_gpu_has_driver_clocks_and_versions(
    log: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\necho "$@" >"$0.log"\necho "580.1, 1980 MHz, 3201 MHz, 1980 MHz, 700.00 W, 40"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine()
    assert found["gpu"] == {
        "name": GPU.name, "capability": "sm_90", "memory_bytes": 80 * 2**30, "multiprocessors": 132,
        "l2_bytes": 50 * 2**20, "driver": "580.1", "sm_clock": "1980 MHz", "memory_clock": "3201 MHz",
        "highest_sm_clock": "1980 MHz", "power_limit": "700.00 W", "temperature": "40",
    }  # fmt: skip
    assert set(found["versions"]) == {"triton", "cuda", "cudnn"}  # type: ignore[call-overload]
    asked = Path(f"{smi}.log").read_text()
    assert "--id=GPU-1234" in asked and "--query-gpu=" in asked
    smi.write_text("#!/bin/sh\necho no devices\nexit 9\n")
    assert "driver" not in machine()["gpu"]  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan_in_every_dtype_and_covers_what_a_view_hides(dtype: torch.dtype) -> None:
    whole = torch.zeros(3, 4, dtype=dtype)
    fill_with_nan(whole[1:, :2])
    assert whole.isnan().all()


def test_new_memory_is_nan_inside_and_everything_is_as_before_outside() -> None:
    with pytest.raises(ZeroDivisionError), new_memory_is_nan():
        assert torch.empty(4).isnan().all() and torch.ones(4).new_empty(2, dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.ones(2)).isnan().all()
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
