"""The oracle: golden logits from transformers, computed in an environment of its own (see docs/oracle.md)."""
