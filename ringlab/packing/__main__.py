"""`python -m ringlab.packing` compares dynamic with static context parallelism for given lengths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.sequence_time import SequenceCosts
from ringlab.errors import RinglabError
from ringlab.nn.text import documents
from ringlab.packing.comparison import compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison, and return the exit status, which is 2 for an impossible request."""
    parser = argparse.ArgumentParser(prog="python -m ringlab.packing", description=__doc__)
    parser.add_argument("lengths", nargs="?", type=Path, help="a text file of lengths in tokens")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=8192, help="most tokens of a rank in a micro-batch")
    parser.add_argument("--model", default="llama3-8b", help="a built-in model, or a TOML file")
    parser.add_argument("--hardware", default="h100", help="built-in hardware, or a TOML file")
    asked = parser.parse_args(arguments)
    try:
        if asked.lengths is None:
            lengths = [len(document) for document in documents()]
        else:
            lengths = [int(word) for word in asked.lengths.read_text(encoding="utf-8").split()]
        costs = SequenceCosts.of(model(asked.model), hardware(asked.hardware))
        found = compare(lengths, asked.ranks, asked.capacity, costs)
        print(
            f"{len(lengths)} sequences, {sum(lengths)} tokens, {asked.ranks} ranks of {asked.capacity} tokens"
        )
        print(found.table())
    except (RinglabError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
