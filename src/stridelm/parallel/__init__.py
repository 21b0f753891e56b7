"""Models over several ranks."""
