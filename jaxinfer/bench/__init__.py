"""Load generator for inference servers, with the latencies that users see: ``jaxinfer bench serve``. No jax."""
