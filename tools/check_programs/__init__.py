"""Ahead-of-time compilation of the engine's programs for a GPU that is absent, and the rules that they must satisfy."""
