"""gRPC API servers: `jaxinfer.v1`, the Open Inference Protocol, health and reflection. No jax."""
