"""What kernels of the delta rule must move and multiply, from sizes alone: the roofline they are measured against."""

from collections.abc import Mapping
from typing import Any

from diptych_kernels.delta_rule.launch_configs import TILE, Call


def flops(kernel: str, of: Call, constants: Mapping[str, Any]) -> int:
    """Multiplications and additions in a launch's products; exponentials and sums of decays are not counted.

    Args:
        kernel: its name without modules.
        of: the call it is part of.
        constants: of the launch.
    """
    size, key, value = of.chunk_size, of.key, of.value
    rows = size // TILE
    tiles = rows * (rows + 1) // 2
    width = constants.get("W", value)
    state = 2 * size * key  # for every column of a state
    pair = 2 * size * size
    by_chunk = {
        "products_by_channel": 2 * tiles * 2 * TILE * TILE * key,
        "products_by_head": 2 * pair * key,
        "solve": size**3 // 3,
        "scan_forward": width * (2 * state + pair + (state + pair if constants.get("OUTPUT") else 0)),
        "scan_backward": value * (3 * state + 2 * pair),
        "state_gradients": 3 * state * value,
        "product_gradients": 2 * pair * value,
        "channel_gradients": 4 * tiles * 2 * TILE * TILE * key,
        "head_gradients": 4 * pair * key,
    }
    if kernel == "compose":
        return of.sequences * of.value_heads * 2 * key * key * value * constants["PARTS"]
    return by_chunk.get(kernel, 0) * of.chunks * of.value_heads
