"""A differential fuzzer for the engine, and the oracle that it is compared with. README.md says what it covers."""
