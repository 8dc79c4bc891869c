"""Pictures of results: those that were measured, and made-up ones for what no machine here can measure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from ringlab.bench.ceilings import CEILINGS, ceiling
from ringlab.bench.draw import draw_all
from ringlab.errors import RinglabError

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
