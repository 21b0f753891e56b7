"""Kernels for CPUs, compiled by Numba on first use and cached on disk (docs/decisions/0007-numba.md)."""
