"""Replicas behind other people's routers: what they have cached, and what they had to compute."""
