"""One case of a GPU benchmark: a contender is timed only after its results have been found correct."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ringlab.bench.contenders import Contender
from ringlab.bench.device import FLUSHES, Device, new_memory_is_nan
from ringlab.bench.interleaved import Times, Turn, interleaved, speed_ratio, statistics_of
from ringlab.bench.problem import CONVENTION, Inputs, Problem, draw, redraw
from ringlab.bench.reference import Reference, Verdict, judge, reference, sample
from ringlab.errors import in_one_line

METHOD = {
    "clock": "CUDA events around each run; medians over rounds in which every contender runs once, in turn",
    "inputs": "normally distributed, drawn anew before every round",
    "cache": f"L2 overwritten {FLUSHES} times before every run, while Python prepares the launches",
    "check": "before timing: outputs poisoned with NaN, then every row finite, and a sample of rows and keys "
    "against float64, each within twice the error of the plainest implementation, one ulp, and what rounding "
    "out does to delta; `errors` are those of the worst row, relative to its length or the median row's",
    "flops": CONVENTION,
    "speed_ratio": "median over rounds of baseline time / subject time: 1 is as fast, 0.5 takes twice as long",
}
"""The way in which the numbers were measured, which is part of every result."""

Pairs = Mapping[str, Iterable[str]]
"""Each subject with its baselines."""


class Bench:
    """Inputs of one problem on a device, which are drawn anew for each round, and their true results."""

    def __init__(self, problem: Problem, device: Device, seed: int | None = None) -> None:
        self.problem, self.device = problem, device
        self.generator = torch.Generator(device=device.name)
        self.seed = self.generator.seed() if seed is None else self.generator.manual_seed(seed).initial_seed()
        self.inputs: Inputs = draw(problem, device.name, self.generator)
        self.expected: Reference = reference(self.inputs, problem.causal, sample(problem.S, self.generator))

    def measure(
        self,
        of: str,
        contenders: Mapping[str, Contender],
        pairs: Pairs,
        rounds: int,
        progress: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return times, TFLOP/s, errors and ratios of one pass, ready for JSON.

        A contender that fails, leaves rows unwritten or is wrong is not timed; `not_timed` contains the
        reason.
        """
        verdicts = {name: self.admit(contender, of) for name, contender in contenders.items()}
        turns = {n: contenders[n].turn(self.inputs, of) for n in contenders if not verdicts[n].refusal}
        # Keep a copy of the inputs for which the true results are known.
        checked = Inputs(*(x.clone() for x in self.inputs))
        times = interleaved(
            turns,
            self.device,
            rounds,
            fresh=lambda: redraw(self.inputs, self.generator),
            progress=progress,
        )
        for tensor, before in zip(self.inputs, checked, strict=True):
            tensor.copy_(before)
        return self._report(of, verdicts, times, pairs)

    def admit(self, contender: Contender, of: str) -> Verdict:
        """Return the verdict on a run whose outputs were allocated in memory full of NaN.

        ringlab's own contenders run once more with all new memory full of NaN, so that any unwritten row is
        found.
        """
        turn = contender.turn(self.inputs, of)
        try:
            verdict = judge(contender.join(_poisoned_run(turn, self.device)), self.expected)
            if verdict.refusal or contender.torchs:
                return verdict
            with new_memory_is_nan():
                again = judge(contender.join(turn.run(turn.prepare())), self.expected)
            return again if again.refusal else verdict
        except Exception as error:  # other kernels are still timed if one cannot run
            reason = in_one_line(error) or "no reason given"
            return Verdict({}, {}, f"{type(error).__name__}: {reason[:300]}")

    def _report(self, of: str, verdicts: dict[str, Verdict], times: Times, pairs: Pairs) -> dict[str, Any]:
        flops = self.problem.flops(of)
        return {
            "pass": of,
            "causal": self.problem.causal,
            "flops": flops,
            "least_bytes": self.problem.least_bytes(of),
            "speed_ratio": {
                subject: {
                    baseline: round(speed_ratio(times, subject, baseline), 4)
                    for baseline in baselines
                    if baseline in times
                }
                for subject, baselines in pairs.items()
                if subject in times
            },
            "not_timed": {name: verdict.refusal for name, verdict in verdicts.items() if verdict.refusal},
            "contenders": {
                name: {
                    **statistics_of(seconds, flops),
                    "errors": verdicts[name].errors,
                    "errors_over_bounds": verdicts[name].of_bounds,
                }
                for name, seconds in times.items()
            },
        }


def all_subjects_timed(cases: list[dict[str, Any]], pairs: Pairs) -> bool:
    """Return whether every subject was found correct and was timed in every case."""
    return all(subject in case["contenders"] for case in cases for subject in pairs)


def _poisoned_run(turn: Turn, device: Device) -> Any:
    """Run twice, and fill the memory of the first run's results with NaN before the second run."""
    outputs = tuple(_tensors(turn.run(turn.prepare())))
    ready = turn.prepare()
    device.poison(outputs)
    del outputs  # so that the second run gets the same memory
    return turn.run(ready)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
