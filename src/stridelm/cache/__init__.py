"""Remembering: the ledger that owns every page of KV, and the tensors behind the pages."""
