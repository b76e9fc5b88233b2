"""The engine core in its own process: the process, the link to it, and its supervisor."""
