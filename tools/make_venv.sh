#!/bin/sh
# Makes a virtual environment with this project in it, or mends a half-made one.
#
#   tools/make_venv.sh .venv '.[test,dev]'
#
# A sound environment is kept as it is. One that was cut off while it was made (the mark beside it is still there), or
# that has an older Python, is made anew. PYTHON=... names the interpreter to use instead of the first found.
set -eu

venv=$1
what=$2
mark=$venv-unfinished
least="3, 12"

is_new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < ($least))" 2>/dev/null
}

can_make_venvs() {
    "$1" -c "import venv, ensurepip" 2>/dev/null
}

# In the order in which they are tried. .python-version steers pyenv's shims (the plain names) and uv.
candidates() {
    printf '%s\n' python3.12 python3.13 python3.14 python3 python
    if command -v uv >/dev/null 2>&1; then
        uv python find --no-python-downloads 2>/dev/null || true
        uv python find --no-python-downloads '>=3.12' 2>/dev/null || true
    fi
    for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        if [ -x "$python" ]; then printf '%s\n' "$python"; fi
    done
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if is_new_enough "$PYTHON"; then printf '%s\n' "$PYTHON" && return; fi
        die "PYTHON=$PYTHON is not a Python >= 3.12."
    fi
    without_pip=
    found=
    old_ifs=$IFS
    IFS='
'
    for python in $(candidates); do
        if ! is_new_enough "$python"; then continue; fi
        if can_make_venvs "$python"; then found=$python && break; fi
        without_pip=${without_pip:-$python}
    done
    IFS=$old_ifs
    if [ -n "$found" ]; then printf '%s\n' "$found" && return; fi
    if [ -n "$without_pip" ]; then
        die "$without_pip cannot make virtual environments: install its venv module (Debian, Ubuntu: python3-venv)."
    fi
    die "jaxinfer needs Python >= 3.12 and found none: tried python3.12, python3.13, python3.14, python3, python, uv" \
        "and pyenv. Install one (apt install python3.12-venv, brew install python@3.12, uv python install 3.12," \
        "pyenv install 3.12) or name it: make PYTHON=/path/to/python"
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_sound() {
    [ ! -e "$mark" ] && [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python" && has_pip
}

# An environment that uv made has no pip; it is given one.
has_pip() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null 2>&1
}

if ! is_sound; then
    python=$(find_python)
    echo "making $venv with $("$python" --version) ($python)"
    mkdir -p "$mark"
    "$python" -m venv --clear "$venv"
fi
echo "installing $what into $venv (the first time: a minute or two)"
mkdir -p "$mark"
status=0
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$what" || status=$?
# pip undoes what it did when it fails by itself; only when it is killed does the mark stay.
if [ "$status" -lt 128 ]; then rmdir "$mark"; fi
exit "$status"
