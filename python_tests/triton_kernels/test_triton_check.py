"""The spills that `make triton-check` accepts as known for a version of Triton."""

from __future__ import annotations

import pytest

from loading import load

pytestmark = pytest.mark.triton

triton_check = load("tools/triton_check.py")
Code, Found, Spills = triton_check.Code, triton_check.Found, triton_check.Spills
# A loop over tiles from 0010 on, which contains one over K, from 0030 to 0060.
SASS = """\
        .headerflags    @"EF_CUDA_SM80"
        /*0000*/                   STL [R1], R4 ;                       /* 0x0000000401007387 */
                                                                        /* 0x000fe20000100800 */
        /*0010*/                   MOV R2, c[0x0][0x28] ;
        /*0020*/              @!P0 BRA 0x70 ;
        /*0030*/                   {first} ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0050*/                   {second} ;
        /*0060*/               @P1 BRA 0x30 ;
        /*0070*/                   LDL R6, [R1] ;
        /*0080*/               @P2 BRA 0x10 ;
        /*0090*/                   EXIT ;
"""
LOAD, STORE, OTHER = "LDL.64 R28, [R1+0x8]", "STL [R1], R5", "IADD3 R5, R5, 0x1, RZ"
KNOWN = Spills(kernels=2, stack_bytes=40, loads_in_loop=1)


def code(*, stack: int = 8, first: str = OTHER, second: str = OTHER):
    return Code({"sass": SASS.format(first=first, second=second)}, 255, "a stack", stack)


def test_instructions_of_the_loop_over_k() -> None:
    sass = code(first=LOAD, second=STORE).text["sass"]
    assert triton_check.in_loops(sass, r"\bLDL\b") == 1
    assert triton_check.in_loops(sass, r"\bSTL\b") == 1
    assert triton_check.in_loops(SASS.replace("HMMA", "FADD"), r"\bLDL\b") is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (code(), True),
        (code(first=LOAD), True),
        (code(stack=40), True),
        (code(stack=48), False),
        (code(stack=0), False),
        (code(first=LOAD, second=LOAD), False),
        (code(first=STORE), False),
    ],
)
def test_spills_that_are_known(found, expected: bool) -> None:
    assert triton_check.is_known(found, KNOWN) is expected
    assert not triton_check.is_known(found, None)


def test_the_newest_version_must_spill_nothing() -> None:
    assert max(triton_check.SPILLS_OF) < (3, 9)


def test_no_more_kernels_than_are_known(monkeypatch) -> None:
    monkeypatch.setattr(triton_check, "SPILLS_OF", {(3, 7): KNOWN})
    monkeypatch.setattr(triton_check, "VERSION", (3, 7))
    spilling, other = Found(255, 0, (), "a stack"), Found(255, 0, ())
    assert triton_check.too_many_spills([spilling, spilling, other]) == ""
    assert "3 kernels have a stack, at most 2" in triton_check.too_many_spills([spilling] * 3)
