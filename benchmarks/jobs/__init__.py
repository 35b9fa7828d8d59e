"""Code that the ranks of benchmarks execute."""
