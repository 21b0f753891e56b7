"""Records what the steps of an engine take, as a cost table for `stride simulate`."""
