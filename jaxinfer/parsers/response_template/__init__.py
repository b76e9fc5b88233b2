"""Parsers for the ``response_template`` of a transformers tokenizer, in time linear in the answer."""
