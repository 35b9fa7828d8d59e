"""What the machine code of kernels at production shapes contains and executes, without a GPU."""

import sys
from pathlib import Path

import pytest

from diptych_kernels import aot as ahead
from diptych_kernels import machine_code
from diptych_kernels.machine_code import Loop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")

SOURCE = """
def kernel():
    for start in range(0, K, BK):  # of the tiles
        for row in range(start // BK):
            pass
    return tl.sum(x)
"""
LISTING = """
.text.kernel:
	//## File "{path}", line 2
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_1:
	//## File "{path}", line 4 inlined at "{path}", line 3
        /*0020*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
.L_x_0:
        /*0040*/                   LDS.128 R12, [R7] ;
        /*0050*/             @UP1  STG.E.64 desc[UR4][R2.64], R12 ;
        /*0060*/               @P0 BRA `(.L_x_0) ;
	//## File "{path}", line 3
        /*0070*/                   BRA `(.L_x_1) ;
	//## File "{path}", line 6
        /*0080*/                   STG.E desc[UR4][R2.64], R12 ;
        /*0090*/                   EXIT ;
        /*0098*/                   BRA `(.L_x_0) ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
        /*00b0*/                   NOP;
"""


def test_loops_of_kernels_that_another_copy_compiled_are_found():
    """The cache of Triton is shared between copies of the package; a removed copy has no source lines to read."""
    lines = Path(machine_code.__file__).with_name("streams.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.strip() == "for start in range(0, D, BD):")
    path = "/removed/kernels/diptych_kernels/streams.py"
    found = machine_code.read(LISTING.replace("{path}", path).replace("line 3", f"line {number}"))
    assert [loop.statement for loop in found.loops] == ["for start in range(0, D, BD):"]


def test_a_listing_is_read(tmp_path):
    """Only branches of for statements are loops; the one after EXIT leaves code that was moved to the end."""
    path = tmp_path / "kernel.py"
    path.write_text(SOURCE)
    found = machine_code.read(LISTING.replace("{path}", str(path)))
    assert found.instructions == 12
    assert found.in_loops == 6
    inner = Loop("for row in range(start // BK):", 3, ())
    assert found.loops == (Loop("for start in range(0, K, BK):", 3, (inner,)),)
    assert found.executed({"K": 64, "BK": 16}) == 6 + 4 * 3 + (0 + 1 + 2 + 3) * 3
    assert found.executed({"K": 64, "BK": 16}, [inner.statement]) == 6 + 4 * 3
    with pytest.raises(ValueError, match=r"values: expected all names of 'for start in range\(0, K, BK\):'; name 'BK'"):
        found.executed({"K": 64})
    with pytest.raises(ValueError, match="statement: expected a for statement over a range, got 'for x in xs:'"):
        Loop("for x in xs:", 3, ()).executed({})
    expected = [(16, False), (2, True), (16, True), (8, True), (4, False)]
    assert [tuple(access) for access in found.accesses] == expected
    assert found.wide_share == 32 / 40
    assert found.narrow_in_loops == 1


@pytest.fixture(scope="module")
def codes():
    from benchmarks.kernels_report import codes

    return codes()


WIDE = [
    "coefficients.project_forward",
    "coefficients.project_backward",
    "coefficients.project_backward (read)",
    *(f"streams.{name}" for name in ("aggregate_forward", "aggregate_backward", "write_forward", "write_backward")),
    *(f"activations.{name}_{way}" for name in ("swiglu", "gelu") for way in ("forward", "backward")),
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", WIDE)
def test_tensors_move_in_accesses_of_sixteen_bytes(codes, name):
    code = codes[name]
    assert code.wide_share >= 0.9
    assert sum(access.nbytes < 8 for access in code.accesses) <= 48, "more than coefficients"
    assert not code.narrow_in_loops


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "expected"),
    [(255, 0, 4, 2), (40, 57344, 8, 4), (32, 0, 4, 16), (128, 94208, 4, 2), (24, 100, 1, 32)],
)
def test_programs_of_a_multiprocessor(registers, shared, num_warps, expected):
    """Limited by registers, shared memory, warps, shared memory, and the number of programs."""
    used = ahead.Resources(registers, 0, shared, num_warps)
    assert ahead.programs(used, 90) == ahead.programs(used, 100) == expected
    with pytest.raises(ValueError, match="capability: expected one of 80, 90, 100, got 86"):
        ahead.programs(used, 86)
    assert ahead.occupancy(used, 90) == expected * num_warps / 64
