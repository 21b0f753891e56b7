"""Anthropic's Messages API, for agents that speak it."""
