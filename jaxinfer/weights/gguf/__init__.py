"""GGUF files (llama.cpp) as checkpoints."""
