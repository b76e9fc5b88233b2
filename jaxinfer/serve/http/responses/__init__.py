"""OpenAI's Responses, without anything that is stored."""
