r"""Derived tolerances, which separate rounding from bugs.

Correct implementations of one computation differ, because they round intermediate values in different places. How much
that changes the result depends on the computation, so no constant tolerance fits. Here the computation itself is asked:
its inputs and parameters are changed by one ulp at random, which is what a rounding error does, and the change of each
result is measured (its *spread*). Two correct implementations differ by a small multiple of it.

Let $a$ and $b$ be a result in both implementations, $s$ the largest spread over some draws and both implementations,
$u$ the unit roundoff of the dtype, and $n$ the length of the longest reduction. In the Euclidean norm of one array,

$$\lVert a - b\rVert \le F s + 1.5 u \sqrt{n}\, \max(\lVert a\rVert, \lVert b\rVert),\qquad F = 2.25.$$

The second term is the floor: both results are rounded once, and a sum of $n$ terms accumulates about $\sqrt{n}$
rounding errors.

In float32 and bfloat16, a difference above this bound is not reported yet: the operations of PyTorch are then run with
emulated rounding (parity.operation_rounding), and $s$ grows to the largest change in up to DRAWS_INSIDE runs.

References:
    Parker, Monte Carlo Arithmetic, UCLA CSD-970002 (1997): random perturbations as a model of rounding errors.
    Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41 (2019):
    errors of sums of n terms grow with the square root of n.
"""

from typing import NamedTuple

import numpy as np

from parity.pytrees import Leaves, is_floating

EPSILON = {"bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
"""Machine epsilon by dtype: the distance of 1 from the next larger number, one ulp of 1."""
FACTOR = 2.25
"""Multiple of the spread that counts as rounding; benchmarks/tolerances.py measures what correct pairs need."""
FLOOR = 1.5
"""Multiple of the unit roundoff, times the square root of the reduction length, that counts as rounding."""
DRAWS = 3
"""Perturbations of each implementation."""
DRAWS_INSIDE = 40
"""Most runs that emulate rounding of each operation, before a difference in a narrow dtype counts."""
EQUAL = "bitwise equal"
ROUNDING = "rounding"
DIFFERENT = "different"


def perturbed(values: Leaves, epsilon: float, rng: np.random.Generator) -> Leaves:
    """Return floating values changed by a factor of 1 + epsilon or 1 - epsilon each, at random."""

    def signs(array: np.ndarray) -> np.ndarray:
        return 1.0 + epsilon * rng.choice((-1.0, 1.0), array.shape)

    changed = {}
    for name, array in values.items():
        if not is_floating(array):
            changed[name] = array
        elif array.dtype.kind == "c":
            changed[name] = np.real(array) * signs(array) + 1j * np.imag(array) * signs(array)
        else:
            changed[name] = array * signs(array)
    return changed


class Difference(NamedTuple):
    """The difference of two arrays that should be equal, and the verdict on it."""

    norm: float
    """Euclidean norm of the difference, relative to the larger norm of both; infinite if only one is finite."""
    ulps: float
    """Largest difference of an element, in ulps of the largest element."""
    tolerance: float
    """Largest relative norm that counts as rounding."""
    rule: str
    """Which term of the tolerance is larger: "spread" or "floor"; "exact" for integers."""
    verdict: str
    """EQUAL, ROUNDING or DIFFERENT."""
    place: tuple[int, ...]
    """Index of the element that differs most."""
    first: float | complex
    """That element in the first array."""
    second: float | complex
    """That element in the second array."""

    @property
    def excess(self) -> float:
        """The difference as a multiple of the tolerance; 0 for equal arrays."""
        if self.verdict == EQUAL:
            return 0.0
        return self.norm / self.tolerance if self.tolerance > 0.0 else float("inf")


def judge(first: np.ndarray, second: np.ndarray, spread: float, dtype: str, length: int = 1) -> Difference:
    """Compare two results and decide if their difference is rounding.

    Args:
        first: result of one implementation.
        second: result of the other, of equal shape.
        spread: largest Euclidean norm by which perturbations changed either result.
        dtype: dtype in which both computed.
        length: length of the longest reduction.
    """
    is_exact = not (is_floating(first) or is_floating(second))
    a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (first, second))
    finite = np.isfinite(a) & np.isfinite(b)
    same = finite | (a == b) | (np.isnan(a) & np.isnan(b))
    gap = np.where(same, np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0)), np.inf)
    place = np.unravel_index(int(np.argmax(gap)), gap.shape) if gap.size else ()
    elements = (a[place].item(), b[place].item()) if gap.size else (0.0, 0.0)
    norm, scale = float(np.linalg.norm(gap)), max(_norm(a, finite), _norm(b, finite))
    largest = max(np.abs(a[finite]).max(initial=0.0), np.abs(b[finite]).max(initial=0.0))
    floor = FLOOR * EPSILON[dtype] / 2.0 * np.sqrt(length) * scale
    allowed = 0.0 if is_exact else FACTOR * spread + floor
    unit = EPSILON[dtype] * 2.0 ** np.floor(np.log2(largest)) if largest > 0.0 else 1.0
    ulps = float(gap.max(initial=0.0) / unit)
    verdict = EQUAL if norm == 0.0 else ROUNDING if norm <= allowed else DIFFERENT
    rule = "exact" if is_exact else "spread" if FACTOR * spread > floor else "floor"
    relative = 1.0 / scale if scale > 0.0 else 1.0
    return Difference(norm * relative, ulps, allowed * relative, rule, verdict, tuple(int(i) for i in place), *elements)


def distance(actual: np.ndarray, exact: np.ndarray) -> float:
    """Return the Euclidean norm of the difference where both are finite."""
    finite = np.isfinite(actual) & np.isfinite(exact)
    return _norm(actual - np.where(finite, exact, 0.0), finite)


def _norm(array: np.ndarray, where: np.ndarray) -> float:
    return float(np.linalg.norm(np.where(where, array, 0.0)))
