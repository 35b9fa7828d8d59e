"""Kernels of the chunked gated delta rule (KDA and GDN), forward and backward, with context parallelism."""
