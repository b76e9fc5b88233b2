"""Process-level services: logging, the event loop, ports, descriptors."""
