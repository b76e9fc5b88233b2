"""Reading of what PEFT writes."""
