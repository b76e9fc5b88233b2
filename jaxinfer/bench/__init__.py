"""Load on a server, and what its users see of it: ``python -m jaxinfer.bench serve``. No jax."""
