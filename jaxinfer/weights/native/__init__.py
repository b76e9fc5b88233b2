"""Converted folders: an Orbax checkpoint for each part of the parameters, and a manifest."""
