"""The engine in a process of its own: the process, the link to it, and who watches over it."""
