"""Metrics, tracing and request logs."""
