"""Mosaic GPU kernels of linear attention on pools of states: `decode` and `prefill`, for GPUs from Ampere on."""
