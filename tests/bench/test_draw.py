"""Every result is drawn with words and units, including made-up results of GPUs that this project lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from ringlab.bench.draw import draw_all
from ringlab.errors import RinglabError

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
MEASURED = sorted((CHECKOUT / "benchmarks/results").glob("*.json"))
MADE_UP = sorted((Path(__file__).parent / "made_up").glob("*.json"))
KINDS = {"kernels": {"bars", "ratios", "roofline"}, "ring": {"bars", "ratios"}}


@pytest.mark.parametrize("file", [*MEASURED, *MADE_UP], ids=lambda path: path.stem)
def test_every_result_is_drawn_with_words_and_units(file: Path, tmp_path: Path) -> None:
    drawn = draw_all([file], tmp_path)
    assert {path.stem.removeprefix(f"{file.stem}-") for path, _ in drawn} == KINDS.get(file.stem, {"bars"})
    result = json.loads(file.read_text())
    for path, alt in drawn:
        pixels = imread(path)
        assert pixels.shape[1] > 600 and len(np.unique(pixels[..., 0])) > 10  # not a blank page
        assert alt.encode("latin-1") in path.read_bytes() and alt in (tmp_path / "figures.md").read_text()
        assert "dc:description" in path.with_suffix(".svg").read_text()
        assert re.search(r"second|TFLOP/s|1 is as fast", alt)
        assert result["machine"]["date"][:10] in alt and f"{result['work']['S']:,} tokens" in alt
        assert ("MADE UP" in alt) == ("note" in result)


def test_a_roof_is_left_out_with_a_note_where_the_gpu_is_not_known(tmp_path: Path) -> None:
    result = json.loads((Path(__file__).parent / "made_up/kernels.json").read_text())
    result["machine"]["gpu"]["name"] = result["machine"]["gpus"][0] = "A GPU nobody built"
    unknown = tmp_path / "unknown.json"
    unknown.write_text(json.dumps(result))
    alts = {path.name: alt for path, alt in draw_all([*MADE_UP, unknown], tmp_path / "out")}
    assert "990 TFLOP/s and 4.80 TB/s, meeting at 206 FLOP per byte" in alts["kernels-roofline.png"]
    assert "does not know A GPU nobody built" in alts["unknown-roofline.png"]
    assert "cudnn not timed" in alts["kernels-bars.png"]


@pytest.mark.parametrize("text", ["", "[]", '{"bench": "nonesuch"}', "not JSON"])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(RinglabError, match=r"ringlab bench"):
        draw_all([file], tmp_path / "out")
    with pytest.raises(RinglabError, match="measure first"):
        draw_all([], tmp_path)


def test_the_file_of_a_gpu_hour_is_drawn_by_its_benches(tmp_path: Path) -> None:
    steps = {file.stem: {"result": json.loads(file.read_text())} for file in MADE_UP}
    hour = tmp_path / "h200.json"
    hour.write_text(json.dumps({"bench": "hour", "steps": {**steps, "tests": {"result": None}, "cut": {}}}))
    names = {path.stem for path, _ in draw_all([hour], tmp_path / "out")}
    assert names == {f"h200-{bench}-{kind}" for bench, kinds in KINDS.items() for kind in kinds}
