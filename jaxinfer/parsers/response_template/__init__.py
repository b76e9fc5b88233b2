"""Parsers that a tokenizer carries: transformers' ``response_template``, read in time that is linear in an answer."""
