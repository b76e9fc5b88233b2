"""The `jaxinfer` command: its subcommands, their flags and their errors. No jax: the implementation of a subcommand is
imported after its flags are parsed."""
