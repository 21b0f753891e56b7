"""Conversations: what a chat template expects, and what a model's message consists of (text, reasoning, tool calls)."""
