"""What chat requests ask for and what their answers are made of, below all doors. No jax."""
