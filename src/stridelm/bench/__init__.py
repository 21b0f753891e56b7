"""Measuring: drafters against plain decoding in one process (latency.py, acceptance.py), and loads (serving/)."""
