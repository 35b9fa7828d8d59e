"""Triton kernels shared by both backends. None yet: the backends compute their reference paths."""
