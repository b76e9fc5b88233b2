"""Attention alone, measured in turns: the XLA path and `torch.nn.functional.scaled_dot_product_attention`."""
