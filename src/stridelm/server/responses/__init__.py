"""OpenAI's Responses API, for agents that speak it."""
