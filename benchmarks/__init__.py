"""Benchmarks of time and memory, compared within one run. Start one by its name: ``python -m benchmarks.mhc``."""
