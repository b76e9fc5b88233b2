"""The version, in one place: pyproject.toml reads it here. No jax."""

__version__ = "0.1.0"
