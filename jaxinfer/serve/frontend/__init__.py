"""The front end that all APIs call: generation, chat, scoring, LoRA adapters."""
