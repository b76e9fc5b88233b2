"""Load on a server, and what its users see of it: ``jaxinfer bench serve``. No jax."""
