"""Model families, one file each: a config, a tree of parameter specs, a Flax module."""
