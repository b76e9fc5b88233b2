"""vLLM's gRPC service based on a `Frontend`, for external routers, with the messages of `smg-grpc-proto`."""
