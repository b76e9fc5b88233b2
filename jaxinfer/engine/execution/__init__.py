"""The devices of one process: their memory, the compiled programs, and what plans mean to them."""
