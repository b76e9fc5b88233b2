"""Training of draft heads for a model: `python -m tools.train_heads --method eagle3 --out jaxinfer/demo`."""
