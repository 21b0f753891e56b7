"""Simulation of engines: the planner, the queue, the ledger and the depth policy as they are, with steps whose duration
a recorded table gives, and drafts that are accepted at random. No model, no tensors, no clock."""
