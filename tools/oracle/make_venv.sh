#!/bin/sh
# Makes the oracle's environment, or leaves a finished one as it is.
#
#   tools/oracle/make_venv.sh .venv-oracle [PYTHON]
#
# Without PYTHON it takes a Python 3.11: other versions may bring a torch with gigabytes of GPU libraries, so they must be
# asked for. Exit status 3: there is none.
set -eu

venv=$1
wanted=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
done_with="$venv/requirements.txt" # a copy of what was installed, written last

works() {
    "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))" 2>/dev/null
}

find_python() {
    for python in $wanted; do
        if works "$python"; then printf '%s\n' "$python"; fi
        return
    done
    for python in python3.11 /usr/bin/python3.11 /usr/local/bin/python3.11 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python; do
        if works "$python"; then printf '%s\n' "$python" && return; fi
    done
}

if cmp -s "$here/requirements.txt" "$done_with"; then exit 0; fi
if [ -L "$venv" ]; then # others may use what it points to
    echo "$venv is a link, and what it points to was not made of these requirements: make it anew there" >&2
    exit 3
fi
python=$(find_python)
if [ -z "$python" ]; then
    echo "no usable Python ${wanted:-3.11} for the oracle (tools/oracle/make_venv.sh $venv PYTHON names another)" >&2
    exit 3
fi
echo "making $venv with $("$python" --version) ($python): torch and transformers, some minutes"
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
cp "$here/requirements.txt" "$done_with"
