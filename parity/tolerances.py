"""Tolerances of the differences between the two backends, by dtype, for commands and tests.

Norm-wise relative means ||a - b|| / max(||a||, ||b||) over one array.
"""

GRADIENT = {"float8": 1e-1, "bfloat16": 4e-2, "float32": 1e-5, "float64": 1e-12}
"""Loss and each parameter's gradient at equal parameters, norm-wise relative.

float8: three times what 20 steps of the default model in bfloat16 show (3e-2); a sum that differs in its last digit may
be rounded to another of the few 8-bit values.

bfloat16: ten times the distance of either backend's whole gradient from its float32 one, 4e-3, as
tests/test_precision.py measures it; gradients of coefficients nearly cancel and lose more than the whole.
"""

GRADIENT_FLOOR = {"float8": 1e-1, "bfloat16": 1e-2, "float32": 1e-2, "float64": 0.0}
"""Share of the whole gradient's norm below which a trained model's gradient is measured against that share.

The gradients of alpha and bias are sums of thousands of terms that nearly cancel; in float32 the
result can be smaller than the terms' rounding errors (docs/history/log.md, 2026-11-20). The same gradients are
therefore also compared in float64, each against its own norm.
"""

LOSS = {"float8": 4e-2, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-10}
"""Loss at any step of two runs from one start, nats per token, absolute.

float8: twice the tolerance of bfloat16.

bfloat16: a fifth of the difference between two seeds over 200 steps of the model in tests/test_precision.py (9e-2 at
most), and four times the difference of either backend from its own float32 run (5e-3).
"""

PARAMETERS = {"float64": 1e-10}
"""Parameters after 20 optimizer steps, norm-wise relative."""

OPERATION = {"bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-14}
"""One operation's outputs and gradients, norm-wise relative."""
