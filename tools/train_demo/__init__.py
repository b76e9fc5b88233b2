"""Training of the demo models that ship with jaxinfer: `python -m tools.train_demo --data DIR --out jaxinfer/demo`."""
