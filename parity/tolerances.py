"""How far apart the two backends may be, by type. The commands and the tests take them from here.

Norm-wise relative means ||a - b|| / max(||a||, ||b||) over one array.
"""

GRADIENT = {"float32": 1e-5, "float64": 1e-12}
"""Loss and each parameter's gradient at equal parameters, norm-wise relative."""

LOSS = {"float32": 1e-5, "float64": 1e-10}
"""Loss at any step of two runs from one start, nats per token, absolute."""

PARAMETERS = {"float64": 1e-10}
"""Parameters after 20 optimizer steps, norm-wise relative."""

OPERATION = {"float32": 2e-6, "float64": 1e-14}
"""One operation's outputs and gradients, norm-wise relative."""
