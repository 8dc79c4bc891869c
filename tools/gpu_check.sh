#!/bin/sh
# `make gpu`: run everything that needs an NVIDIA GPU by `ringlab bench hour`, the most valuable steps first.
#
# It installs nothing and needs no .venv, because it takes ringlab from this checkout. Python 3.11 to 3.13 must have
# torch 2.11 or later with CUDA, triton 3.6 or later, numpy, matplotlib, jaxtyping, rich, typer, cloudpickle and pytest.
# With pytest-xdist the tests take less time, because most of their time is compilation, which can run in parallel.
#
#   PYTHON=python3            the interpreter; by default .venv/bin/python if its torch has CUDA, else python3
#   HOUR_ARGS="--steps kernels --again"   options of `ringlab bench hour`
# It reads the GPU's clocks and never sets them.
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
unset TRITON_INTERPRET

say() { printf '%s\n' "ringlab: $*" >&2; }

has_cuda() { "$1" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; }

python="${PYTHON:-}"
if [ -z "$python" ]; then
    python=python3
    ! has_cuda .venv/bin/python || python=.venv/bin/python
fi

missing="$("$python" - <<'PYTHON'
import importlib.util
names = ("torch", "triton", "numpy", "matplotlib", "jaxtyping", "rich", "typer", "cloudpickle", "pytest")
print(*(name for name in names if importlib.util.find_spec(name) is None))
PYTHON
)" || exit 1
if [ -n "$missing" ]; then
    say "needed: $missing, for $python"
    say "remedy: $python -m pip install $missing   (or PYTHON=/path/to/another)"
    exit 1
fi
if ! has_cuda "$python"; then
    "$python" -c 'from ringlab.bench.device import no_cuda; print("ringlab:", no_cuda())' >&2
    exit 1
fi

# shellcheck disable=SC2086 # options are a list of words
exec "$python" -m ringlab bench hour ${HOUR_ARGS:-}
