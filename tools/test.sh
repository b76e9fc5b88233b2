#!/usr/bin/env bash
# tools/test.sh PYTHON [pytest's arguments]: the tests, files side by side in as many processes as there are cores (at
# most 4); interpreted GPU kernels in processes with 8 threads of XLA: a kernel's thread that waits at a barrier holds
# one of them, so with those of two cores it would wait for ever.
set -uo pipefail

python=$1
shift
failed=0 empty=0 cores=$(nproc)
beside=(-n "$((cores < 4 ? cores : 4))" --dist loadfile --no-loadscope-reorder)

run() {
    "$@"
    case $? in
    0) ;;
    5) empty=$((empty + 1)) ;; # nothing of this kind was asked for
    *) failed=1 ;;
    esac
}

run "$python" -m pytest "${beside[@]}" "$@"
if [ "$cores" -lt 8 ]; then
    speed="not slow and not parity"
    for word in "$@"; do [ "$word" = slow ] && speed=slow; done
    run env NPROC=8 "$python" -m pytest "${beside[@]}" "$@" -m "interpreted and $speed"
else
    empty=$((empty + 1))
fi
[ "$failed" -eq 0 ] && [ "$empty" -lt 2 ]
