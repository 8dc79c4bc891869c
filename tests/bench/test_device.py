"""The clock and the description of a GPU, with stand-ins for what a machine without one lacks.

Pictures of results: those that were measured, and made-up ones for what no machine here can measure.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from ringlab.bench import device as device_module
from ringlab.bench.device import FLUSHES, Cuda, fill_with_nan, machine, new_memory_is_nan
from ringlab.bench.draw import CEILINGS, ceiling, draw_all
from ringlab.errors import RinglabError

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


CHECKOUT = Path(__file__).resolve().parents[2]
MEASURED = sorted((CHECKOUT / "benchmarks/results").glob("*.json"))
MADE_UP = sorted((Path(__file__).parent / "made_up").glob("*.json"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """All results drawn, by file name: the picture and its words."""
    drawn = draw_all([*MEASURED, *MADE_UP], tmp_path_factory.mktemp("pictures"))
    return {path.name: (path, alt) for path, alt in drawn}


def test_made_up_results_say_so_and_are_not_among_the_measured() -> None:
    assert MADE_UP and MEASURED
    assert all("MADE UP" in json.loads(path.read_text())["note"] for path in MADE_UP)
    assert not any("note" in json.loads(path.read_text()) for path in MEASURED)


@pytest.mark.parametrize("file", [*MEASURED, *MADE_UP], ids=lambda path: path.stem)
def test_every_result_is_drawn_with_words_and_units(file: Path, pictures) -> None:
    drawn = [picture for name, picture in pictures.items() if name.startswith(f"{file.stem}-")]
    assert drawn
    result = json.loads(file.read_text())
    for path, alt in drawn:
        pixels = imread(path)
        assert pixels.shape[1] > 600 and len(np.unique(pixels[..., 0])) > 10  # not a blank page
        assert alt.encode("latin-1") in path.read_bytes()
        svg = path.with_suffix(".svg").read_text()
        assert svg.startswith("<?xml") and "dc:description" in svg
        assert alt in (path.parent / "figures.md").read_text()
        assert re.search(r"second|TFLOP/s|1 is as fast", alt)
        assert result["machine"]["date"][:10] in alt and f"{result['work']['S']:,} tokens" in alt
        assert ("MADE UP" in alt) == ("note" in result)


def test_kernels_get_a_roofline_and_a_ring_gets_ratios(pictures) -> None:
    kinds = {"kernels": ("bars", "ratios", "roofline"), "ring": ("bars", "ratios")}
    wanted = {f"{path.stem}-{kind}.png" for path in MADE_UP for kind in kinds[path.stem]}
    assert set(pictures) == wanted | {f"{path.stem}-bars.png" for path in MEASURED}


def test_the_words_tell_every_number_and_what_was_not_timed(pictures) -> None:
    assert "cudnn not timed" in pictures["kernels-bars.png"][1]
    assert "triton 1.4 TFLOP/s" in pictures["kernels-bars.png"][1]
    assert "triton ring / triton once 0.80" in pictures["ring-ratios.png"][1]
    assert "4096 FLOP per byte" in pictures["kernels-roofline.png"][1]


def test_a_roof_is_drawn_where_it_is_known_and_left_out_with_a_note_elsewhere(
    tmp_path: Path, pictures
) -> None:
    (known,) = [path for path in MADE_UP if path.stem == "kernels"]
    result = json.loads(known.read_text())
    unknown = tmp_path / "unknown.json"
    result["machine"]["gpu"]["name"] = result["machine"]["gpus"][0] = "A GPU nobody built"
    unknown.write_text(json.dumps(result))
    alts = {path.name: alt for path, alt in draw_all([unknown], tmp_path / "out")}
    assert "990 TFLOP/s and 4.80 TB/s, meeting at 206 FLOP per byte" in pictures["kernels-roofline.png"][1]
    assert "does not know A GPU nobody built" in alts["unknown-roofline.png"]
    assert "Ceilings 9" not in alts["unknown-roofline.png"]


def test_every_ceiling_names_its_source_and_is_a_gpus() -> None:
    for name, roof in CEILINGS.items():
        assert "data sheet" in roof.source
        assert 100 < roof.flops / roof.bandwidth < 500, name  # FLOP per byte where the two ceilings meet
    assert ceiling("a toaster") is None


def test_drawing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        draw_all(MEASURED[:1], tmp_path / folder)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("text", ["", "[]", '{"bench": "nonesuch"}', "not JSON"])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(RinglabError, match=r"ringlab bench"):
        draw_all([file], tmp_path / "out")
    with pytest.raises(RinglabError, match="measure first"):
        draw_all([], tmp_path)
