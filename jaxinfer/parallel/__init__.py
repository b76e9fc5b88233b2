"""The mesh of devices: what lies where on it, and what crosses from one process to another."""
