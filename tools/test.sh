#!/usr/bin/env bash
# tools/test.sh ENVIRONMENT PYTHON [pytest's arguments]: files side by side in as many processes as there are cores (at most 4).
# build/durations/ENVIRONMENT.xml has how long each test took; `python -m tools.durations` prints the longest.
#
#   host         the plain environment: the fast tier; with arguments, what they name
#   slow         the same environment: the slow tier
#   devices      tests/parallel/devices, in processes that have eight devices each
#   interpreted  GPU kernels, in processes with 8 threads of XLA: a kernel's thread that waits at a barrier holds one of
#                them, so with those of two cores it would wait for ever
#
# The last two take -m "slow", or -m "interpreted and slow", for what takes minutes.
set -uo pipefail

environment=$1 python=$2
shift 2
cores=$(nproc) asked=$#
run=("$python" -m pytest -n "$((cores < 4 ? cores : 4))" --dist loadfile --no-loadscope-reorder
    --junitxml="build/durations/$environment.xml")

case $environment in
host) exec "${run[@]}" "$@" ;;
slow) exec "${run[@]}" -m "slow and not parity and not fleet" "$@" ;;
devices)
    [ "$asked" -gt 0 ] || set -- tests/parallel/devices
    exec env XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=8" "${run[@]}" "$@"
    ;;
interpreted)
    [ "$asked" -gt 0 ] || set -- tests/kernels tests/benchmarks/gpu/test_all_sections.py tests/gpu_check/test_gpu_check*.py
    exec env NPROC=8 "${run[@]}" -m "interpreted and not slow and not parity and not fleet" "$@"
    ;;
*)
    echo "tools/test.sh: there is no environment $environment" >&2
    exit 2
    ;;
esac
