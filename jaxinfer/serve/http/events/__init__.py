"""Shared code of the item-based HTTP APIs (Messages, Responses): answers as parts, and their streaming steps."""
