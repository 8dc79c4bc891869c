"""For lengths of real documents, dynamic assignment is compared with static assignment, and is nearly balanced."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.sequence_time import SequenceCosts
from ringlab.errors import LayoutError
from ringlab.nn.text import documents
from ringlab.packing import compare
from ringlab.packing.__main__ import main

COSTS = SequenceCosts.of(model("llama3-8b"), hardware("h100"))


@pytest.mark.parametrize(("P", "capacity", "least"), [(16, 16384, 1.2), (32, 8192, 1.8), (8, 32768, 1.0)])
def test_real_lengths_are_nearly_balanced(P: int, capacity: int, least: float) -> None:
    """For real lengths the time is at most 10 % above the bound, and below static if static hops are exposed."""
    found = compare([len(document) for document in documents()], P, capacity, COSTS)
    assert found.least_s <= found.dynamic_s <= 1.1 * found.least_s
    assert found.speedup >= least
    for number in range(len(found.dynamic.micro_batches)):
        assert found.dynamic.tokens(number).max() <= capacity


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("9000 400\n300 500 200")
    assert main([str(lengths), "--ranks", "4", "--capacity", "4096"]) == 0
    printed = capsys.readouterr().out
    assert "5 sequences, 10400 tokens, 4 ranks of 4096 tokens" in printed
    assert compare([9000, 400, 300, 500, 200], 4, 4096, COSTS).table() in printed
    assert main([str(lengths), "--ranks", "2"]) == 0 and main([str(lengths), "--ranks", "1"]) == 2
    assert "a capacity of 9000 tokens" in capsys.readouterr().err
    assert main([str(tmp_path / "none.txt")]) == 2


@pytest.mark.parametrize("text", ["0 0 0", "5 -3", "many"])
def test_the_command_refuses_files_without_tokens(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(text)
    assert main([str(lengths)]) == 2
    out, err = capsys.readouterr()
    assert not out and ("invalid literal" if text == "many" else "lengths in tokens") in err


def test_comparisons_without_tokens_are_refused() -> None:
    for lengths in ([], [0, 0], [4, -4], [5, -3]):
        with pytest.raises(LayoutError, match="lengths in tokens"):
            compare(lengths, 4, 4096, COSTS)
    assert compare([0, 5], 4, 4096, COSTS).static_s > 0
