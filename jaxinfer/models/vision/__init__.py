"""Vision towers of models, a file for each family."""
