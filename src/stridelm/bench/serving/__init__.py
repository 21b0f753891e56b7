"""Measuring a server or an engine under load: named scenarios, loads, and the figures that clients see."""
