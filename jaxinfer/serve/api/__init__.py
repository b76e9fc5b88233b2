"""The vocabulary of all APIs: requests, errors, authentication, admission control."""
