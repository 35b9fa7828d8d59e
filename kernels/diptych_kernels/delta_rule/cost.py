"""Floating-point operations of the delta rule's kernels, computed from sizes for the roofline of benchmarks."""

from collections.abc import Mapping
from typing import Any

from diptych_kernels.delta_rule.launch_configs import TILE, Call


def flops(kernel: str, call: Call, constants: Mapping[str, Any]) -> int:
    """Return the multiplications and additions in the matrix products of a launch.

    Exponentials and sums of decays are not counted.

    Args:
        kernel: name of the kernel without its modules.
        call: sizes of the call.
        constants: constants of the launch.

    Returns:
        The number of operations; 0 for a kernel without matrix products.
    """
    size = call.chunk_size
    key = call.key_dim
    value = call.value_dim
    rows = size // TILE
    tiles = rows * (rows + 1) // 2
    width = constants.get("W", value)
    state = 2 * size * key  # per column of a state
    pair = 2 * size * size
    by_chunk = {
        "terms_by_channel": 2 * tiles * 2 * TILE * TILE * key,
        "terms_by_head": 2 * pair * key,
        "invert": size**3 // 3,
        "scan_forward": width * (2 * state + pair + (state + pair if constants.get("OUTPUT") else 0)),
        "scan_backward": value * (3 * state + 2 * pair),
        "state_gradients": 3 * state * value,
        "product_gradients": 2 * pair * value,
        "channel_gradients": 4 * tiles * 2 * TILE * TILE * key,
        "head_gradients": 4 * pair * key,
    }
    if kernel == "compose":
        return call.sequences * call.value_heads * 2 * key * key * value * constants["PARTS"]
    return by_chunk.get(kernel, 0) * call.chunks * call.value_heads
