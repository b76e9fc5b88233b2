"""Attention by itself, in turns: the XLA path beside `torch.nn.functional.scaled_dot_product_attention`."""
