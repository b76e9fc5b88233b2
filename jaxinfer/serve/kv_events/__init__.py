"""Which pages are cached, for routers outside: what the engine tells, numbered, kept, told on (docs/kv_events.md)."""
