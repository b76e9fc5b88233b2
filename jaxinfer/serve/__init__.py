"""Serving: what a running engine shows to the world."""
