"""Pure layers that families are built from."""
