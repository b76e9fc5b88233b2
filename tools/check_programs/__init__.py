"""The engine's own programs, compiled for a GPU that is not there, and what must hold of them."""
