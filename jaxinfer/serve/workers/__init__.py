"""Worker processes that parse, tokenize and render untrusted input, and the pools that run them."""
