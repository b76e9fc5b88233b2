"""Version of the package; pyproject.toml reads it from here. No jax."""

__version__ = "0.1.0"
