#!/bin/sh
# Everything that needs an NVIDIA GPU, in one go; `make gpu` runs it:
#   tests    the case table on the GPU, the transports between processes (with cloudpickle), and tests of the
#            benchmarks' clock and memory  (tests/gpu)
#   kernels  `ringlab bench kernels`             -> $RESULTS/kernels-<gpu>.json
#   ring     `ringlab bench ring --emulated 8`   -> $RESULTS/ring-<gpu>.json
#   draw     bars and rooflines of all results   -> $FIGURES
# Each part runs even if one before it failed; the exit status is 1 if any did.
#
# Nothing is installed and no .venv is needed: ringlab is taken from this checkout. Python 3.11 to 3.13 must have
# torch 2.11 or later with CUDA, triton 3.6 or later, numpy, matplotlib, jaxtyping, rich, typer and pytest.
#
#   PYTHON=python3            the interpreter; by default .venv/bin/python where that has CUDA, else python3
#   PARTS="tests kernels"     some of the parts only
#   RESULTS=benchmarks/results  FIGURES=build/figures   where results and pictures go
#   KERNELS_ARGS="--rounds 11"  RING_ARGS="--emulated 4 --tokens 32768"   more options
#   PYTEST_ARGS="-n 8"        with pytest-xdist: most of the tests' time is compiling, which goes side by side
# It reads the GPU's clocks and never sets them. Look at the results before you commit them.
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
unset TRITON_INTERPRET
results="${RESULTS:-benchmarks/results}"
figures="${FIGURES:-build/figures}"

say() { printf '%s\n' "ringlab: $*" >&2; }

has_cuda() { "$1" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; }

python="${PYTHON:-}"
if [ -z "$python" ]; then
    python=python3
    ! has_cuda .venv/bin/python || python=.venv/bin/python
fi

missing="$("$python" - <<'PYTHON'
import importlib.util
names = ("torch", "triton", "numpy", "matplotlib", "jaxtyping", "rich", "typer", "pytest")
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

ringlab() { "$python" -c 'from ringlab.cli import main; main()' "$@"; }
gpu="$("$python" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))')"

part() { # shellcheck disable=SC2086 # options are lists of words
    case "$1" in
        tests) "$python" -m pytest -q -p no:cacheprovider --confcutdir=tests/gpu tests/gpu ${PYTEST_ARGS:-} ;;
        kernels) ringlab bench kernels --output "$results/kernels-$gpu.json" ${KERNELS_ARGS:-} ;;
        ring) ringlab bench ring --emulated 8 --output "$results/ring-$gpu.json" ${RING_ARGS:-} ;;
        draw) ringlab bench draw "$results"/*.json --out "$figures" ;;
        *) say "no part is called $1: tests, kernels, ring, draw" && return 1 ;;
    esac
}

failed=""
for name in ${PARTS:-tests kernels ring draw}; do
    say "$name, on $gpu"
    part "$name" || failed="$failed $name"
done
[ -z "$failed" ] || say "FAILED:$failed"
[ -z "$failed" ]
