"""The kernels to be tuned of each op; `pallas_kernels.tune.kernels` lists them."""
