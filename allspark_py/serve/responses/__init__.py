"""OpenAI's Responses protocol, over what chat does."""
