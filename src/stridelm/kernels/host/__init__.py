"""Kernels for CPUs, compiled by Numba on first use and kept on disk (docs/decisions/0007-numba.md)."""
