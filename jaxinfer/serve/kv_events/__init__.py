"""Which pages are cached, for routers outside: what the engine tells, kept, numbered and told on (docs/kv_events.md)."""
