"""Converted folders: an Orbax checkpoint for each top-level parameter subtree, and a manifest."""
