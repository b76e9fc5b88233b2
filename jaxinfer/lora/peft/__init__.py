"""PEFT adapter folders: reader and writer."""
