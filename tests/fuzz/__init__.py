"""A differential fuzzer for the engine, and the oracle that it is held against. README.md says what it covers."""
