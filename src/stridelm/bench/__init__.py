"""Measuring drafters against plain decoding: same process, same prompts, and the ratio is the figure."""
