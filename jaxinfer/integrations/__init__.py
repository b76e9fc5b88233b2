"""Programs of others that run and scale servers: a module for each, which alone imports it."""
