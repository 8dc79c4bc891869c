"""Hardware tables give a source for each value; users' files are read, written back, or refused with the line."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ringlab.cost import toml_file
from ringlab.cost.hardware import (
    MeasuredBlock,
    Reached,
    hardware,
    hardware_names,
    read_hardware,
    write_hardware,
)
from ringlab.errors import CostError

MINE = """\
# my cards
[mine]
title = "Eight cards under my desk"
ranks_per_node = 8
memory = "24 GB"
memory_bandwidth = "1008 GB/s"
source = "the data sheet"

[mine.flops]
bfloat16 = "165 TFLOP/s"
float32 = "82 TFLOP/s"

[mine.inside]
name = "PCIe 4"
bandwidth = "25 GB/s"
latency = "10 us"
source = "assumed"

[mine.between]
name = "Ethernet"
bandwidth = "10 Gb/s"
latency = "50 us"
source = "assumed"
"""


def test_what_is_promised_is_there() -> None:
    promised = ("a100", "a100-40gb", "h100", "h200", "b200", "tpu-v3", "tpu-v4", "tpu-v5e", "laptop")
    assert set(promised) <= set(hardware_names())
    assert len(hardware_names()) == len(set(hardware_names()))


@pytest.mark.parametrize("name", hardware_names())
def test_every_value_has_a_source_and_a_plausible_size(name: str) -> None:
    it = hardware(name)
    assert it.name == name and it.title
    for source in (it.source, it.inside.source, it.between.source, it.reached.source):
        assert len(source) > 10
    assert it.inside.bytes_per_s > it.between.bytes_per_s
    assert it.inside.latency_s < it.between.latency_s < 1e-3
    assert it.memory_bytes_per_s > it.inside.bytes_per_s
    assert it.peak("bfloat16") >= it.flops_per_s.get("float32", 0)


def test_what_write_ups_get_wrong() -> None:
    """Peaks and bandwidths are the right GPU's, per direction, and without sparsity."""
    assert hardware("a100").peak("bfloat16") == 312e12
    assert hardware("h100").peak("bfloat16") == 989.4e12
    assert hardware("a100").inside.bytes_per_s * 2 == 600e9
    assert hardware("h100").inside.bytes_per_s * 2 == 900e9
    assert hardware("a100").peak("tf32") * 2 == hardware("a100").peak("bfloat16")
    assert hardware("h100").between.bytes_per_s == 50e9  # 400 Gb/s
    assert hardware("h100").reached.attention_forward == pytest.approx(648 / 989.4, abs=5e-4)
    assert hardware("h100").reached.attention_backward == pytest.approx(561 / 989.4, abs=5e-4)


def test_links_inside_and_between() -> None:
    h100 = hardware("h100")
    assert h100.link(0, 7) is h100.inside
    assert h100.link(7, 8) is h100.between
    assert h100.link(15, 8) is h100.inside
    with pytest.raises(CostError, match="float8") as raised:
        h100.peak("float64")
    assert "bfloat16" in str(raised.value)


@pytest.mark.parametrize(("asked", "near"), [("h10", "h100"), ("A100", "a100"), ("tpuv4", "tpu-v4")])
def test_unknown_names_are_told_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(CostError, match=f"nearest: {near}"):
        hardware(asked)
    with pytest.raises(CostError, match="there are: a100"):
        hardware("zzzzzz")


def test_users_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    it = hardware(path)
    assert it == hardware(str(path)) == hardware(f"{path}:mine") == read_hardware(path)["mine"]
    assert it.memory_bytes == 24e9 and it.between.bytes_per_s == 1.25e9
    assert it.reached == Reached()
    with pytest.raises(CostError, match="nearest: mine"):
        hardware(f"{path}:main")
    path.write_text(MINE + MINE.replace("mine", "other"))
    with pytest.raises(CostError, match="mine, other"):
        hardware(path)
    assert hardware(f"{path}:other").name == "other"


def test_the_form_in_the_docstring_is_read(tmp_path: Path) -> None:
    from ringlab.cost import hardware as module

    example = str(module.__doc__).split("same form:\n")[1].split("Every quantity")[0]
    (tmp_path / "x.toml").write_text("\n".join(line[4:] for line in example.splitlines()))
    assert hardware(tmp_path / "x.toml").inside.bytes_per_s == 25e9


REFUSED = {  # for each case: the old text, the new text, and words that the error must contain
    "bare number": ('"24 GB"', "24", 5, "mine.memory", "with a unit"),
    "wrong dimension": ('"24 GB"', '"24 GB/s"', 5, "mine.memory", "unit of bytes/s"),
    "negative latency": ('"10 us"', '"-10 us"', 16, "mine.inside.latency", "zero or more"),
    "misspelt key": ("memory_bandwidth", "memory_bandwith", 6, "mine.memory_bandwith", "'memory_bandwidth'"),
    "unknown dtype": ("bfloat16 =", "bfloat =", 10, "mine.flops.bfloat", "'bfloat16'"),
    "missing key": ('latency = "10 us"\n', "", 13, "mine.inside", "the key 'latency'"),
    "misspelt table": ("[mine.between]", "[mine.betwen]", 19, "mine.betwen", "'between'"),
    "no table": (
        MINE[MINE.index("[mine.flops]") : MINE.index("[mine.inside]")],
        'flops = "165 TFLOP/s"\n',
        9,
        "mine.flops",
        "a table, begun with",
    ),
    "no tables at all": (MINE, "# nothing\n", 1, "", "at least one table"),
    "no dtype": (
        'bfloat16 = "165 TFLOP/s"\nfloat32 = "82 TFLOP/s"\n',
        "",
        9,
        "mine.flops",
        "at least one of float8",
    ),
    "half a rank": ("ranks_per_node = 8", "ranks_per_node = 8.5", 4, "mine.ranks_per_node", "whole number"),
    "true": ("ranks_per_node = 8", "ranks_per_node = true", 4, "mine.ranks_per_node", "whole number"),
    "empty source": ('"the data sheet"', '" "', 7, "mine.source", "text in quotes"),
    "control characters": ("Eight cards", "\\u001b[31mEight", 3, "mine.title", "printable"),
    "table twice": ("[mine.between]", "[mine.inside]", 19, "", "twice|overwrite|Cannot"),
    "unclosed quote": ('"24 GB"', '"24 GB', 5, "", "valid TOML"),
    "a name with a path": ("[mine]", '["../mine"]', 2, "../mine", "a name of at most"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_faults_are_refused_with_file_line_and_key(fault: str, tmp_path: Path) -> None:
    """The line is right in files with the line ends of Windows, too."""
    old, new, line, key, told = REFUSED[fault]
    assert old in MINE
    path = tmp_path / "mine.toml"
    path.write_bytes(MINE.replace(old, new, 1).replace("\n", "\r\n").encode())
    with pytest.raises(CostError) as raised:
        read_hardware(path)
    text = str(raised.value)
    assert f"{path}, line {line}" in text
    assert f"line {line}, {key}:" in text or not key
    assert re.search(told, text)
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (MINE.encode() + b"# caf\xe9\n", "line 24: UTF-8 text"),
        (b"#" * (toml_file.MOST_BYTES + 1), "256 KiB"),
        (b"x = " + b"[" * 50_000 + b"]" * 50_000, "ordinary size and depth"),
        (b"x = 1\n" + b"a." * 100_000 + b"b = 1", "line 2: at most 200 dots"),
    ],
    ids=["latin-1", "size", "depth", "dots"],
)
def test_files_that_are_no_text_or_endless_are_refused(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(CostError, match=told):
        hardware(tmp_path / "x.toml")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path, tmp_path / "pipe.toml"):
        with pytest.raises(CostError, match="not a regular file"):
            hardware(path)
    for name in (str(tmp_path / "nowhere.toml"), "nul\0.toml"):
        with pytest.raises(CostError):
            hardware(name)


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    block = MeasuredBlock("float32", "forward", 1e-15, 0.1 + 0.2, 0.0, 64, 'a "run"', 256, 128, 1 / 3)
    odd = replace(
        hardware("h100"),
        name="0.odd_name-1",
        title='"quoted" \\ ünïcode #',
        flops_per_s={"float8": 1e21, "float64": 1 / 3},
        block_times=(block, replace(block, largest_causal=None, kernel_tile=None)),
    )
    path = tmp_path / "x.toml"
    for it in (odd, *map(hardware, hardware_names())):
        write_hardware(path, it)
        assert read_hardware(path) == {it.name: it}
        assert hash(it) == hash(hardware(path))


def test_what_could_not_be_read_back_is_not_written_in_silence(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="can be written"):
        write_hardware(tmp_path / "no" / "x.toml", hardware("h100"))
    precious = tmp_path / "precious.toml"
    write_hardware(precious, hardware("a100"))
    for change in ({"name": "a:b"}, {"name": "x y"}, {"name": ""}, {"title": "a\nb"}, {"source": " "}):
        for file in (tmp_path / "x.toml", precious):
            with pytest.raises(CostError):
                write_hardware(file, replace(hardware("h100"), **change))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["precious.toml"]  # no temporary file is left
    assert hardware(precious) == hardware("a100")


def test_a_file_that_a_link_points_at_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text("old")
    (tmp_path / "link.toml").symlink_to(tmp_path / "real.toml")
    write_hardware(tmp_path / "link.toml", hardware("h100"))
    assert (tmp_path / "link.toml").is_symlink() and hardware(tmp_path / "real.toml") == hardware("h100")


def test_values_made_in_python_are_checked_too() -> None:
    block = MeasuredBlock("float32", "forward", 0, 0, 0, 64, "s")
    wrong: list[tuple[object, str, object]] = [
        (hardware("h100"), "memory_bytes", float("inf")),
        (hardware("h100"), "memory_bytes_per_s", -1.0),
        (hardware("h100"), "ranks_per_node", 0),
        (hardware("h100"), "flops_per_s", {"bfloat16": float("nan")}),
        (Reached(), "linear", 1.5),
        (hardware("h100").inside, "latency_s", -1.0),
        (block, "pass_", "sideways"),
        (block, "dtype", "int8"),
        (block, "per_row_s", -1.0),
        (block, "kernel_tile", 0),
    ]
    for it, name, value in wrong:
        with pytest.raises(CostError):
            replace(it, **{name: value})  # type: ignore[type-var]


TRICKY = '''\
# [not.a.table] "nor this
a = "# no comment" # [x]
"quoted key" = \'\'\'
[no.table]
b = 1
\'\'\'
[t] # a comment
c = [ # an array
  "x = 1", # over lines
  { d = 2 },
]
e.f = """
"quoted" \\"""
g = 3"""
[[rows]]
h = 1
[[rows]]
h = 2
[rows.under]
i = "]"
[t.'sub.table'.z]
j = { k = "}" }
'''


def test_lines_of_keys() -> None:
    found = toml_file.lines(TRICKY)
    places = {
        "a": 2, "quoted key": 3, "t": 7, "t c": 8, "t e": 12, "t e f": 12, "rows": 15, "rows 0": 15, "rows 0 h": 16,
        "rows 1": 17, "rows 1 h": 18, "rows 1 under": 19, "rows 1 under i": 20, "t sub.table z": 21,
        "t sub.table z j": 22, "t sub.table z j k": 22,
    }  # fmt: skip
    assert {" ".join(map(str, key)): line for key, line in found.items()} == places
    assert toml_file.line_of(("t", "c", 1, "d"), found) == 8
    assert toml_file.line_of(("nowhere",), found) == 1
