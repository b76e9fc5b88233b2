"""Readers of file formats that several packages share. Standard library alone."""
