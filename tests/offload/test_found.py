"""Programs of the fuzzer of offload that were silently wrong once."""

import pytest

from tests.fuzz.grammars.offload import Program, check
from tests.fuzz.harness import EQUAL

SIMPLE = {"order": "plain", "tie": "none", "optimizer": "sgd", "num_prefetch_layers": 0}
OFF = {"activations": False, "clip": False, "early_alias": False}


def program(layers: tuple[str, ...], *actions: tuple[str, int], **more) -> Program:
    return Program(layers=layers, actions=actions, **(SIMPLE | OFF | more))


FOUND = {
    "statistics that a checkpoint's replay updates again": program(
        ("dropout", "batchnorm"), ("train", 272), order="checkpoint"
    ),
    "the same in a backward that fails": program(
        ("batchnorm", "batchnorm"), ("raise in backward", 79), order="checkpoint"
    ),
    "a fused optimizer after a state was read": program(
        ("mlp",),
        ("train", 434),
        ("read parameters", 593),
        ("load", 463),
        ("optimizer step", 780),
        optimizer="adamw fused",
    ),
    "a write by .data after a state was read": program(
        ("dropout", "dropout", "view"), ("load", 32), ("write parameter", 3), tie="head"
    ),
    "a write by .data after a backward that failed": program(
        ("scale",), ("raise in backward", 702), ("write parameter", 648)
    ),
    "a graph made under another manager": program(
        ("batchnorm", "mlp", "buffer"),
        ("forward", 253),
        ("register again", 226),
        ("move", 72),
        ("backward", 473),
        order="parallel",
    ),
    "a penalty whose backward comes later": program(("mlp", "bias"), ("penalty", 1), ("no_grad", 2), ("backward", 3)),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_is_that_of_the_plain_program(name):
    assert check(FOUND[name]).verdict == EQUAL
