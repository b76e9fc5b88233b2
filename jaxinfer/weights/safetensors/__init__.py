"""Hugging Face folders: reader of untrusted safetensors files, and writer."""
