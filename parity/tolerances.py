"""How far apart the two backends may be, by type. The commands and the tests take them from here.

Norm-wise relative means ||a - b|| / max(||a||, ||b||) over one array.
"""

GRADIENT = {"float32": 1e-5, "float64": 1e-12}
"""Loss and each parameter's gradient at equal parameters, norm-wise relative."""

GRADIENT_FLOOR = {"float32": 1e-2, "float64": 0.0}
"""Share of the whole gradient's norm below which a trained model's gradient is measured against that share.

The gradients of alpha and bias are sums of thousands of terms that all but cancel; in float32 what is
left can be smaller than the terms' rounding errors (docs/log.md, 2026-11-20). The same gradients are
therefore also compared in float64, each against its own norm.
"""

LOSS = {"float32": 1e-5, "float64": 1e-10}
"""Loss at any step of two runs from one start, nats per token, absolute."""

PARAMETERS = {"float64": 1e-10}
"""Parameters after 20 optimizer steps, norm-wise relative."""

OPERATION = {"float32": 2e-6, "float64": 1e-14}
"""One operation's outputs and gradients, norm-wise relative."""
