#!/usr/bin/env bash
# tools/test.sh STAGE PYTHON [pytest's arguments]: files side by side in as many processes as there are cores (at most 4).
# How long each test took stands in build/durations/STAGE.xml; `python -m tools.durations` prints the longest.
#
#   host         all tests but those of the other stages; with arguments, all that they name
#   extended     of these, the files that take half of the time (tests/conftest.py)
#   slow         what takes minutes
#   devices      tests/parallel/devices, in processes that have eight devices each
#   interpreted  GPU kernels, in processes with 8 threads of XLA: a kernel's thread that waits at a barrier holds one of
#                them, so with those of two cores it would wait for ever
#
# The last two may be given a part of their own tests, and -m "slow" or -m "interpreted and slow" for what takes minutes.
set -uo pipefail

stage=$1 python=$2
shift 2
cores=$(nproc) asked=$#
run=("$python" -m pytest -n "$((cores < 4 ? cores : 4))" --dist loadfile --no-loadscope-reorder
    --junitxml="build/durations/$stage.xml")

case $stage in
host)
    [ "$asked" -gt 0 ] || set -- -m "not extended and not slow and not parity and not fleet"
    exec "${run[@]}" "$@"
    ;;
extended) exec "${run[@]}" -m "extended and not slow and not parity and not fleet" "$@" ;;
slow) exec "${run[@]}" -m slow "$@" ;;
devices)
    [ "$asked" -gt 0 ] || set -- tests/parallel/devices
    exec env XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=8" "${run[@]}" "$@"
    ;;
interpreted)
    [ "$asked" -gt 0 ] || set -- tests/kernels tests/gpu_check/test_gpu_check*.py
    exec env NPROC=8 "${run[@]}" -m "interpreted and not slow and not parity and not fleet" "$@"
    ;;
*)
    echo "tools/test.sh: there is no stage $stage" >&2
    exit 2
    ;;
esac
