"""The same step on two gloo processes, and the script of docs/huggingface.md under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ringlab import VirtualCluster, launch, zigzag
from ringlab.comm.ring import Ring
from tests.hf.models import batch_of, bounds, errors, qwen2, truth
from tests.hf.ways import over, step_over

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = (7, 5, 9)
SCRIPT = re.search(
    r"```py\n(# train\.py.*?)```", (CHECKOUT / "docs/huggingface.md").read_text(encoding="utf-8"), re.DOTALL
)


def test_two_processes() -> None:
    config, layout, batch = qwen2(), zigzag(21, 2), batch_of(21, documents=DOCUMENTS)
    true = truth(config, batch)
    allowed = bounds(config, batch, true)
    results = launch(step_over, 2, config, layout, batch).results
    for step, virtual in zip(results, over(config, layout, batch), strict=True):
        assert all(error <= allowed[name] for name, error in errors(step, true).items())
        assert step.loss == virtual.loss  # bit by bit what virtual ranks have
        assert all(torch.equal(step.gradients[name], x) for name, x in virtual.gradients.items())


def test_the_script_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun on two processes, and on one rank alone: the same losses, which fall."""
    assert SCRIPT is not None
    script = tmp_path / "train.py"
    script.write_text(SCRIPT[1], encoding="utf-8")
    two = losses(under_torchrun(script, 2))

    def alone(ring: Ring) -> None:
        monkeypatch.setattr("ringlab.connect", lambda _: nullcontext(ring))
        exec(compile(SCRIPT[1], "train.py", "exec"), {})

    VirtualCluster(1).run(alone)
    one = losses(capsys.readouterr().out)
    assert len(two) == len(one) == 5 and two[-1] < two[0]
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(two, one, strict=True))


def under_torchrun(script: Path, processes: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script)],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]
