"""A model at the terminal: what `jaxinfer generate` and `jaxinfer chat` do."""
