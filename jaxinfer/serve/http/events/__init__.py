"""What HTTP doors with items, not choices, share: an answer as parts, and the steps in which they come."""
