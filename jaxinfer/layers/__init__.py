"""Pure layers from which model families are built."""
