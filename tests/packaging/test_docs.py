"""The generated pages of docs/ say what the code says today, and the generators say what they read."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Annotated

import pytest
import typer

import ringlab
from tools.docs import __main__ as docs
from tools.docs import architecture, benchmarks, commands, names, picture
from tools.house.floors import FLOORS

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = dict(docs.pages())


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (CHECKOUT / name).read_text(encoding="utf-8") == PAGES[name], f"out of date: {docs.COMMAND}"


def test_a_page_that_drifted_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "CHECKOUT", tmp_path)
    monkeypatch.setattr(docs, "pages", PAGES.items)
    (tmp_path / "docs").mkdir()
    assert docs.main([]) == 0 and docs.main(["--check"]) == 0
    (tmp_path / "docs/cli.md").write_text("another text")
    capsys.readouterr()
    assert docs.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/cli.md is out of date: python -m tools.docs\n"
    assert (tmp_path / "docs/cli.md").read_text() == "another text"
    assert docs.main([]) == 0 and (tmp_path / "docs/cli.md").read_text() == PAGES["docs/cli.md"]


SECTION = """\
## demo

Paint a file. Or several.

```sh
ringlab demo x --depth 3
```

```text
demo FILES... [OPTIONS]
```

| Argument |  |
| --- | --- |
| `FILES...` | What to paint. |

| Option | Default |  |
| --- | --- | --- |
| `--depth N` | `2` | How deep. |
| `--shade light\\|dark` |  | Which shade. |
| `--keep, --no-keep` | `--keep` | Keep the old one. |
| `--quick` |  | Fewer of them. |"""


def test_a_command_is_described_by_its_own_help() -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def demo(
        files: Annotated[list[Path], typer.Argument(help="What to paint.")],
        depth: Annotated[int, typer.Option(help="How deep.")] = 2,
        shade: Annotated[str | None, typer.Option(help="Which shade.", metavar="light|dark")] = None,
        keep: Annotated[bool, typer.Option(help="Keep the old one.")] = True,
        quick: Annotated[bool, typer.Option("--quick", help="Fewer of them.")] = False,
        secret: Annotated[str, typer.Option(help="Not shown.", hidden=True)] = "",
    ) -> None:
        """Paint a file.
        Or several.

        ringlab demo x --depth 3
        """

    assert commands._section("demo", typer.main.get_command(app)) == SECTION


def test_every_command_has_a_section() -> None:
    headings = [line[3:] for line in PAGES["docs/cli.md"].splitlines() if line.startswith("## ")]
    assert {
        "ringlab plan",
        "ringlab bench draw",
        "ringlab grade",
        "ringlab gradebook show",
        "ringlab lab l1",
    } <= {*headings}
    assert len(headings) == len(set(headings)) > 30


def test_every_public_name_has_a_section() -> None:
    page = PAGES["docs/api.md"]
    missing = [name for name in ringlab._HOME if f"\n## {name}\n" not in page]
    assert missing == []
    for text in (
        "## oracle.attention",
        "`ShapeError`",
        "# Query is Float[Any, 'B H Lq D']",
        ">>> out, lse = attention(",
    ):
        assert text in page
    assert "](#oraclegradients)" in page and "](#oraclegradients-1)" in page  # Gradients, and gradients()


def test_a_long_signature_has_a_line_for_each_parameter() -> None:
    text = "f(q: Float[Tensor, 'B H'], *, name: str='a, b', shape: tuple[int, int]=(1, 2), other: dict[str, tuple[int, ...]]=...) -> Query"
    assert names._signature(text, {"Query": "Float[Tensor, 'B']", "KeyValue": "unused"}) == (
        "```py\nf(\n    q: Float[Tensor, 'B H'],\n    *,\n    name: str = 'a, b',\n    shape: tuple[int, int] = (1, 2),\n"
        "    other: dict[str, tuple[int, ...]] = ...,\n) -> Query\n# Query is Float[Tensor, 'B']\n```"
    )


def test_every_module_of_the_floors_is_listed() -> None:
    page = PAGES["docs/architecture.md"]
    for _, rooms in FLOORS:
        for room in rooms:
            path = room.replace(".", "/")
            assert f"| **`{path}/`** |" in page or f"| `{path}.py` |" in page, room
    assert "| `naive.py` | " in page and "| `e05_emulated_ring/` | " in page


def test_a_package_is_listed_with_its_modules_and_their_first_lines(tmp_path: Path) -> None:
    for name, text in {
        "demo/room/__init__.py": '"""A room.\n\nMore of it."""',
        "demo/room/one.py": '"""Cuts\na | b.\n\nNot shown."""',
        "demo/room/inner/__init__.py": '"""An inner room."""',
        "demo/room/inner/two.py": '"""Two."""',
        "demo/room/inner/bare.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(architecture._rows(tmp_path, "demo.room")) == [
        ("**`demo/room/`**", "A room."),
        ("`one.py`", "Cuts a \\| b."),
        ("**`inner/`**", "An inner room."),
        ("`inner/two.py`", "Two."),
    ]
    assert list(architecture._maps(tmp_path, "demo.room")) == ["In `demo/room/`:\n\nMore of it."]


@pytest.mark.parametrize("text", ["x = 1", '"""Its stages, in call order:\n\n1. check"""'])
def test_a_module_without_a_role_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/__init__.py").write_text('"""A room."""')
    (tmp_path / "room/one.py").write_text(text)
    with pytest.raises(ValueError, match=r"one\.py: the docstring's first paragraph is no whole sentence"):
        list(architecture._rows(tmp_path, "room"))


def test_the_picture_shows_every_block_at_every_rank_and_all_pairs_at_the_end() -> None:
    space = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(picture.drawing())
    labels = [text.text or "" for text in root.iter(f"{space}text")]
    for origin in range(picture.P):
        assert labels.count(f"KV{origin}") == picture.P
    filled = [
        sum(
            rect.get("fill") in picture.COLOURS and rect.get("stroke") is not None
            for rect in group.iter(f"{space}rect")
        )
        for group in root.iter(f"{space}g")
    ]
    assert [count for count in filled if count] == [4, 8, 12, 16]
    assert "Rank 0 attends to the K/V of rank 3" in (root.findtext(f"{space}desc") or "")


def test_the_figures_are_those_of_the_results(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks/results"
    shutil.copytree(CHECKOUT / "benchmarks/results", copy)
    assert benchmarks.page(tmp_path) == PAGES["docs/benchmarks.md"]
    measured = json.loads((copy / "emulate-cpu.json").read_text())
    (copy / "emulate-cpu.json").write_text(json.dumps({**measured, "forward_ratio": 7.654}))
    assert "| 7.65 |" in benchmarks.page(tmp_path)
    peers = json.loads((copy / "peers/float32.json").read_text())
    peers["cases"][0]["contenders"]["torch-context-parallel"]["correct"] = False
    (copy / "peers/float32.json").write_text(json.dumps(peers))
    first = re.search(r"\| torch-context-parallel [^|]*\| ([\d.]+) \|", PAGES["docs/benchmarks.md"])
    assert first is not None and f"| {first[1]}, wrong |" in benchmarks.page(tmp_path)


def test_a_result_of_a_gpu_takes_the_place_of_none(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks/results"
    shutil.copytree(CHECKOUT / "benchmarks/results", copy)
    for path in [*copy.glob("kernels-*.json"), *copy.glob("ring-*.json")]:
        path.unlink()
    assert "Nothing has been measured on a GPU yet." in benchmarks.page(tmp_path)
    machine = json.loads((copy / "emulate-cpu.json").read_text())["machine"] | {"gpus": ["Made-up 9000"]}
    timed = {"median_s": 0.002, "tflops": 123.4}
    case = {
        "pass": "forward",
        "causal": True,
        "contenders": {"triton": timed},
        "speed_ratio": {"triton": {"flash": 0.9}},
    }
    (copy / "kernels-made-up.json").write_text(json.dumps({"cases": [case], "machine": machine}))
    page = benchmarks.page(tmp_path)
    assert "| forward, causal | triton | 2.000 ms | 123 TFLOP/s | 0.90 of flash |" in page
    assert "2 cores, Made-up 9000" in page and "Nothing has been measured" not in page
