"""Execution on the devices of one process: device memory, compiled programs, and the runner of plans."""
