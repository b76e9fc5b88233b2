"""What a replica under somebody else's orchestrator needs, whichever that is: nothing here imports one. No jax."""
