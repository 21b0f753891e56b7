"""The KV cache: the ledger that owns every page, and the tensors that hold the pages."""
