"""Trials of kernels on the GPU at hand: each launch that a program makes runs once, in a process that may be killed."""
