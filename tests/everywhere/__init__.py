"""Every technique in models that this project did not write."""
