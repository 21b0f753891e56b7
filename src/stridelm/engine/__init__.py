"""The step loop: engine.py wires the parts together, step.py runs a step, emit.py makes its outputs."""
