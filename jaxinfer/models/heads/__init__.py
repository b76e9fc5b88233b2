"""Draft heads: EAGLE, Medusa, multi-token prediction."""
