"""`python -m tests.fuzz --inputs 1000000 --seed 1 --output benchmarks/results/fuzz/judge.json`.

The command gives this number of inputs to the parser of the judge's protocol and the same number to the
reader of notebooks, and writes the outcomes. It exits with 1 if there are findings. `--show TARGET NUMBER`
runs one input again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringlab.bench.device import machine
from tests.fuzz.engine import TARGETS, fuzz, fuzz_beside, input_of, lines_missed

CHECKOUT = Path(__file__).resolve().parents[2]
TRACED = 20_000
"""The number of inputs for which executed lines are recorded, to find lines that no input reaches."""


def digests() -> dict[str, str]:
    """Return the SHA-256 of each fuzzed source file, by its path in the checkout."""
    files = sorted(Path(module.__file__ or "") for _, modules in TARGETS.values() for module in modules)
    return {
        file.relative_to(CHECKOUT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def run(inputs: int, seed: int, processes: int) -> dict[str, Any]:
    """Return the record of a whole run as JSON-able data."""
    sources, targets = digests(), {}
    for target in TARGETS:
        fuzzed = fuzz_beside(target, seed, inputs, processes)
        told = ", ".join(f"{count:,} {outcome}" for outcome, count in Counter(fuzzed.outcomes).most_common())
        print(
            f"{target}: {fuzzed.inputs:,} inputs in {fuzzed.seconds:.0f} s: {told}; {len(fuzzed.findings)} findings",
            flush=True,
        )
        for finding in fuzzed.findings:
            print(f"  input {finding.number}: {finding.what} ({finding.where})\n    {finding.input[:200]}")
        targets[target] = {
            **fuzzed.as_dict(),
            "lines_missed": lines_missed(target, seed, min(inputs, TRACED)),
        }
    return {
        "bench": "fuzz",
        "seed": seed,
        "processes": processes,
        "targets": targets,
        "sources": sources,
        "machine": machine(),
    }


def main() -> None:
    """Run the fuzzer as the command line requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--show", nargs=2, metavar=("TARGET", "NUMBER"), help="show one input and its outcome"
    )
    chosen = parser.parse_args()
    if chosen.show:
        target, number = chosen.show[0], int(chosen.show[1])
        print(input_of(target, chosen.seed, number))
        for found in fuzz(target, chosen.seed, [number]).findings:
            print(json.dumps(asdict(found), indent=2))
        return
    record = run(chosen.inputs, chosen.seed, chosen.processes)
    if chosen.output is not None:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(any(target["findings"] for target in record["targets"].values()))


if __name__ == "__main__":
    main()
