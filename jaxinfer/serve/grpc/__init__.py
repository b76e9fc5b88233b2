"""The gRPC doors: `jaxinfer.v1` and the Open Inference Protocol, health and reflection. No jax."""
