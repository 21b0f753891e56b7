"""The path: engine.py wires the rooms together, step.py is what happens, emit.py is what the caller sees."""
