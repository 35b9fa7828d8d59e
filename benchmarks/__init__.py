"""Speed, measured as ratios within one run. Each module is a command: ``python -m benchmarks.mhc``."""
