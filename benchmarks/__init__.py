"""Measurements. Each program here is a command of its own; figures that count are kept in results/."""
