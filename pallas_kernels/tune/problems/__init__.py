"""What each op says of its kernels to have them tuned; `pallas_kernels.tune.kernels` lists them."""
