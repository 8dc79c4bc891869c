#!/bin/sh
# Make .venv and install ringlab in it with the locked versions: tools/setup.sh [extra,extra], the learner's extra by default.
# A stamp keeps the second run fast. PYTHON=… chooses the interpreter, which can be 3.11, 3.12 or 3.13.
set -eu
cd "$(dirname "$0")/.."
extras="${1:-lab}"
venv=.venv

say() { printf '%s\n' "ringlab: $*" >&2; }

usable() { # a Python of a supported version that really runs
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if usable "$PYTHON"; then
            printf '%s' "$PYTHON"
            return
        fi
        say "needed: Python 3.11, 3.12 or 3.13"
        say "   got: PYTHON=$PYTHON, $("$PYTHON" --version 2>&1 || true)"
        say "remedy: make lab PYTHON=/path/to/python3.12"
        exit 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if usable "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    say "needed: Python 3.11, 3.12 or 3.13"
    say "   got: $(command -v python3 >/dev/null && python3 --version 2>&1 || echo 'no python3 on the PATH')"
    say "remedy: install one of them (Debian, Ubuntu: apt-get install python3 python3-venv; macOS: brew install python@3.12)"
    say "        or name it: make lab PYTHON=/path/to/python3.12"
    exit 1
}

make_venv() {
    python="$(find_python)" || exit 1
    if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        say "needed: Python's venv and ensurepip modules"
        say "   got: $("$python" --version 2>&1) without them"
        say "remedy: Debian, Ubuntu: apt-get install python3-venv; or name another Python: make lab PYTHON=/path/to/python3.12"
        exit 1
    fi
    say "making $venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$venv"
}

# Print a hash of everything on which an installation depends, also the path, to which an editable install points.
fingerprint() {
    "$venv/bin/python" - "$extras" <<'PYTHON'
import hashlib, os, pathlib, sys
parts = [sys.version.encode(), os.getcwd().encode(), sys.argv[1].encode()]
parts += [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "requirements.lock")]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PYTHON
}

usable "$venv/bin/python" || make_venv
stamp="$venv/installed-$(printf '%s' "$extras" | tr ',' '-')"
now="$(fingerprint)"
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$now" ]; then
    exit 0
fi
say "installing the locked versions; the first time this downloads PyTorch"
rm -f "$stamp"
# The build backend is locked too, so nothing unlocked is fetched to build ringlab itself.
pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c requirements.lock "$@"
}
pip_install hatchling editables
pip_install --no-build-isolation -e ".[$extras]"
# pip compiles one file after the other, but this uses every core. Some packages have templates that do not compile.
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
settings="$venv/share/jupyter/lab/settings"
mkdir -p "$settings"
cp tools/jupyter/overrides.json "$settings/overrides.json"
printf '%s\n' "$now" >"$stamp"
