r"""Derived tolerances, which separate rounding from bugs.

Correct implementations of one computation differ, because they round intermediate values in different places. How much
that changes the result depends on the computation, so no constant tolerance fits. Here the tolerance is measured on the
computation itself: its inputs and parameters are changed by one ulp at random, as a rounding error changes them, and
the change of each result is its *spread*. Two correct implementations differ by a small multiple of the spread.

Let $a$ and $b$ be a result in both implementations, $s$ the largest spread over some draws and both implementations,
$u$ the unit roundoff of the dtype, and $n$ the length of the longest reduction. In the Euclidean norm of one array,

$$\lVert a - b\rVert \le F s + 1.5 u \sqrt{n}\, \max(\lVert a\rVert, \lVert b\rVert),\qquad F = 2.25.$$

The second term is the floor: both results are rounded once, and a sum of $n$ terms accumulates about $\sqrt{n}$
rounding errors.

Elements that are equal on both sides, and that no run moves, are constants: they do not enter the norms of $a$ and $b$.
Otherwise a mask of -1e30 would hide all other elements. Norms are scaled by the largest element, so that they
neither overflow nor underflow. Numbers below the smallest normal one round absolutely, by up to SMALLEST each.

In float32 and bfloat16, a difference above this bound is not reported yet: the operations of PyTorch are then run with
emulated rounding (parity.operation_rounding), and $s$ grows to the largest change in up to DRAWS_INSIDE runs. Integers
are compared exactly in float64. In narrower dtypes, as many may differ as those runs change, times $F$.

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
UNITS = {**EPSILON, "float16": 2.0**-10}
"""Machine epsilon of the dtypes in which an implementation may compute inside."""
SMALLEST = {"bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022, "float16": 2.0**-24}
"""Size of a rounding error near 0: the smallest normal number, since XLA replaces smaller ones by 0."""
FACTOR = 2.25
"""Multiple of the spread that counts as rounding; benchmarks/tolerances.py measures what correct pairs need."""
FLOOR = 1.5
"""Multiple of the unit roundoff, times the square root of the reduction length, that counts as rounding."""
NARROW = 4.0 / 3.0
"""FACTOR and FLOOR are this much larger in dtypes narrower than float64, where constants such as 1 - 0.999 are rounded
too, which no perturbation of inputs shows."""
DRAWS = 3
"""Perturbations of each implementation."""
DRAWS_INSIDE = 40
"""Most runs that emulate rounding of each operation, before a difference in a narrow dtype counts."""
EQUAL = "bitwise equal"
ROUNDING = "rounding"
DIFFERENT = "different"
UNJUDGED = "not judged"


def perturbed(values: Leaves, epsilon: float, rng: np.random.Generator) -> Leaves:
    """Return floating values changed by a factor of 1 + epsilon or 1 - epsilon each, at random.

    The largest numbers of a dtype stay as they are, instead of becoming infinite.
    """

    def moved(array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            found = array * (1.0 + epsilon * rng.choice((-1.0, 1.0), array.shape))
        return np.where(np.isinf(found), array, found)

    changed = {}
    for name, array in values.items():
        if not is_floating(array):
            changed[name] = array
        elif array.dtype.kind == "c":
            changed[name] = moved(np.real(array)) + 1j * moved(np.imag(array))
        else:
            changed[name] = moved(array)
    return changed


class Spread(NamedTuple):
    """The change of a result by runs on changed inputs."""

    size: float
    """Largest Euclidean norm of the change; of integers, the largest number of elements that change."""
    moved: np.ndarray
    """True for the elements that change in a run."""

    def merged(self, other: "Spread | None") -> "Spread":
        """Return the spread over the runs of both."""
        if other is None:
            return self
        return Spread(max(self.size, other.size), self.moved | other.moved)


def spread_of(actual: np.ndarray, exact: np.ndarray) -> Spread:
    """Return the change of a result in one run."""
    moved = (actual != exact) & ~((actual != actual) & (exact != exact))
    return Spread(distance(actual, exact) if is_floating(exact) else float(np.sum(moved)), moved)


class Difference(NamedTuple):
    """The difference of two arrays that should be equal, and the verdict on it."""

    norm: float
    """Euclidean norm of the difference, relative to the larger norm of both; infinite if only one is finite. Of
    integers, the share of the elements that differ."""
    ulps: float
    """Largest difference of an element, in ulps of the largest element."""
    tolerance: float
    """Largest relative norm that counts as rounding."""
    rule: str
    """The larger term of the tolerance, "spread" or "floor"; for integers "exact", or "flips" of rounded ones."""
    verdict: str
    """EQUAL, ROUNDING, DIFFERENT or UNJUDGED."""
    place: tuple[int, ...]
    """Index of the element that differs most."""
    first: complex
    """That element in the first array."""
    second: complex
    """That element in the second array."""

    @property
    def excess(self) -> float:
        """The difference as a multiple of the tolerance; 0 for equal arrays."""
        if self.verdict == EQUAL:
            return 0.0
        return self.norm / self.tolerance if self.tolerance > 0.0 else float("inf")


def judge(
    first: np.ndarray,
    second: np.ndarray,
    spread: float,
    dtype: str,
    length: int = 1,
    moved: np.ndarray | None = None,
) -> Difference:
    """Compare two results and decide if their difference is rounding.

    Args:
        first: result of one implementation.
        second: result of the other, of equal shape.
        spread: largest Euclidean norm by which perturbations changed either result; of integers, the largest number
            of elements that may differ.
        dtype: dtype in which both computed.
        length: length of the longest reduction.
        moved: True for elements that perturbations changed; None: any of them.
    """
    if not (is_floating(first) or is_floating(second)):
        return _judge_integers(first, second, spread)
    a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (first, second))
    finite = np.isfinite(a) & np.isfinite(b)
    same = finite | (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(over="ignore"):
        gap = np.where(same, np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0)), np.inf)
    counted = finite if moved is None else finite & (moved | (gap > 0.0))
    exponent = int(np.frexp(max(_largest(a[counted]), _largest(b[counted])))[1])
    norm = _norm(gap, exponent)
    scale = max(_norm(a[counted], exponent), _norm(b[counted], exponent))
    widened = 1.0 if dtype == "float64" else NARROW
    with np.errstate(over="ignore"):
        measured, smallest = np.ldexp((widened * FACTOR * spread, SMALLEST[dtype] * np.sqrt(gap.size)), -exponent)
    floor = widened * FLOOR * UNITS[dtype] / 2.0 * np.sqrt(length) * scale
    allowed = float(measured + floor + smallest)
    ulps = float(np.ldexp(gap.max(initial=0.0), -exponent) / (UNITS[dtype] / 2.0))
    is_rounding = np.isfinite(allowed) and norm <= allowed
    verdict = EQUAL if not gap.any() else ROUNDING if is_rounding else DIFFERENT
    relative = 1.0 / scale if scale > 0.0 else 1.0
    rule = "spread" if measured > floor else "floor"
    return Difference(norm * relative, ulps, allowed * relative, rule, verdict, *_largest_element(gap, a, b))


def _judge_integers(first: np.ndarray, second: np.ndarray, flips: float) -> Difference:
    """Compare integers or truth values exactly; so many of them may differ as rounding changes, times FACTOR."""
    # Differences modulo 2**64 are exact, also of int64 and uint64.
    wide = [x.astype(np.int64).view(np.uint64) if x.dtype.kind != "u" else x.astype(np.uint64) for x in (first, second)]
    negative = [x < 0 if x.dtype.kind == "i" else np.zeros(x.shape, bool) for x in (first, second)]
    is_less = np.where(negative[0] == negative[1], wide[0] < wide[1], negative[0])
    is_unequal = (wide[0] != wide[1]) | (negative[0] != negative[1])
    gap = np.maximum(np.where(is_less, wide[1] - wide[0], wide[0] - wide[1]), is_unequal.astype(np.uint64))
    count = int(np.count_nonzero(gap))
    size = max(1, gap.size)
    allowed = FACTOR * flips
    verdict = EQUAL if count == 0 else ROUNDING if count <= allowed else DIFFERENT
    largest = float(gap.max(initial=0))
    rule = "flips" if flips else "exact"
    return Difference(count / size, largest, allowed / size, rule, verdict, *_largest_element(gap, first, second))


def _largest_element(gap: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[tuple[int, ...], complex, complex]:
    """Return the index of the largest gap, and the elements there."""
    if not gap.size:
        return (), 0.0, 0.0
    place = np.unravel_index(int(np.argmax(gap)), gap.shape)
    return tuple(int(i) for i in place), a[place].item(), b[place].item()


def distance(actual: np.ndarray, exact: np.ndarray) -> float:
    """Return the Euclidean norm of the difference where both are finite."""
    finite = np.isfinite(actual) & np.isfinite(exact)
    with np.errstate(over="ignore"):
        return length_of(np.where(finite, actual, 0.0) - np.where(finite, exact, 0.0))


def length_of(array: np.ndarray) -> float:
    """Return the Euclidean norm, without overflow or underflow of squares."""
    exponent = int(np.frexp(_largest(array))[1])
    with np.errstate(over="ignore"):
        return float(np.ldexp(_norm(array, exponent), exponent))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def _norm(array: np.ndarray, exponent: int) -> float:
    """Return the Euclidean norm divided by a power of two."""
    sizes = np.abs(array)
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(np.ldexp(sizes, -exponent)))
