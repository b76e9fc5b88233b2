"""Evaluation of a model as it is served: `jaxinfer eval perplexity`."""
