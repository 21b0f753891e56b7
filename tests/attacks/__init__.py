"""Attacks by untrusted clients on a server, and how it must respond."""
