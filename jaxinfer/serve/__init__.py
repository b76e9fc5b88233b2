"""API server: serves a running engine over gRPC and HTTP."""
