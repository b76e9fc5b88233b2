"""vLLM's gRPC service over a `Frontend`, for routers outside. Its messages are `smg-grpc-proto`'s."""
