"""The command `jaxinfer`: its subcommands, their flags and their errors. No jax: what a command does is imported when
its flags are read."""
