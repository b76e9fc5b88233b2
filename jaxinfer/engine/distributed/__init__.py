"""Engines over several devices or processes with the interface of one."""
