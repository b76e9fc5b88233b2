"""Engines of several devices or processes that look like one."""
