"""Implementation of `jaxinfer generate`, `jaxinfer chat` and `jaxinfer control`."""
