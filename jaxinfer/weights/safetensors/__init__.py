"""Hugging Face folders: reading safetensors files that nobody vouches for, and writing them."""
