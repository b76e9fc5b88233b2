"""Oracle of golden logits: transformers, run in an environment of its own (see docs/oracle.md)."""
