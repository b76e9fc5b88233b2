"""Tests that run in a process with eight devices: ``make test-devices``.

By hand: ``XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m pytest tests/parallel/devices``.
"""

import os

FORCED = "--xla_force_host_platform_device_count=8"

collect_ignore_glob = [] if FORCED in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
