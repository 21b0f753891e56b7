"""Conversion between text and token ids: the engine itself works on ids only."""
