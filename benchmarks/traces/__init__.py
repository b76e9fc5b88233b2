"""Recorded workloads: reading them, serving them, and what an ideal server would make of them."""
