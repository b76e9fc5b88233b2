"""Trials of kernels on this GPU: each launch of a program runs once, in a process that may be killed."""
