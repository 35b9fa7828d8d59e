"""What the ranks of benchmarks run."""
