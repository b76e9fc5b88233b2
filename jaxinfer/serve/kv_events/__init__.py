"""KV cache events for external routers: numbered, buffered and published (docs/kv_events.md)."""
