"""Replicas behind third-party routers: cache hits and prefilled tokens."""
