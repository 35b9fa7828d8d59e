"""Time of linear layers in FP8 on a GPU, beside bfloat16 and torchao.

    python -m benchmarks.fp8              (make bench NAME=fp8; writes benchmarks/results/fp8-<gpu>-<date>.json)

Every map is [tokens, width] by [width, width], x in bfloat16 and weights in float32, forward and backward. bfloat16
includes the cast of the weights. torchao is measured if it is installed, called directly and compiled.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels import description, save, seconds
from diptych.plans.fp8 import Format, ProductRecipe, Recipe, product_recipe

RECIPES: list[tuple[Format, Recipe]] = [("hybrid", "current"), ("e4m3", "blockwise"), ("hybrid", "blockwise")]
ROUNDS = 20
"""Calls of JAX that one time contains."""


def main() -> None:
    """Measure, print and write all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    content = description(device) | {"tokens": given.tokens, "width": given.width, "rows": []}
    table = Table("backend", "map", "forward, µs", "with backward, µs", "× bfloat16")
    plain: dict[str, float] = {}
    for row in rows(given.tokens, given.width, device):
        content["rows"].append(row)
        both = row["forward_and_backward_us"]
        ratio = plain.setdefault(row["backend"], both) / both
        table.add_row(row["backend"], row["map"], f"{row['forward_us']:,.0f}", f"{both:,.0f}", f"{ratio:.2f}")
        save("fp8-", content)
    content["complete"] = True
    Console().print(table)
    print(f"written: {save('fp8-', content)}")


def rows(tokens: int, width: int, device: str) -> Iterator[dict[str, Any]]:
    """Measure each map; the first row of a backend is bfloat16."""
    for name, function in {"bfloat16": in_bfloat16(), **fp8_maps(), **peers(width, device)}.items():
        x = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
        weight = (torch.randn(width, width, device=device) / width**0.5).requires_grad_()
        gradient = torch.randn(tokens, width, device=device).bfloat16()
        yield times("torch", name, *torch_calls(function, x, weight, gradient), device)
        del x, weight, gradient
    yield from jax_rows(tokens, width)


def times(backend: str, name: str, forward: Callable[[], Any], both: Callable[[], Any], device: str) -> dict[str, Any]:
    """Return the row of a map."""
    row: dict[str, Any] = {"backend": backend, "map": name}
    row["forward_us"] = seconds(forward, device) * 1e6
    row["forward_and_backward_us"] = seconds(both, device) * 1e6
    return row


def torch_calls(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a call of a map without gradients, and one with the gradients of x and weight."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return function(x, weight)

    def both() -> Any:
        return torch.autograd.grad(function(x, weight), [x, weight], gradient)

    return forward, both


def in_bfloat16() -> Callable[..., torch.Tensor]:
    """Return the map in bfloat16."""
    return lambda x, weight: torch.nn.functional.linear(x, weight.to(x.dtype))


def fp8_maps() -> dict[str, Callable[..., torch.Tensor]]:
    """Return our maps by name."""
    from reference_torch.fp8 import fp8_linear

    def of(recipe: ProductRecipe) -> Callable[..., torch.Tensor]:
        return lambda x, weight: fp8_linear(x, weight, recipe)

    return {f"{recipe}, {format}": of(product_recipe(format, recipe)) for format, recipe in RECIPES}


def peers(width: int, device: str) -> dict[str, Callable[..., torch.Tensor]]:
    """Return torchao's maps with one scale for an array, or none without torchao."""
    if importlib.util.find_spec("torchao") is None or device == "cpu":
        return {}
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    layer = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16))
    convert_to_float8_training(layer, config=Float8LinearConfig())

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"0.weight": weight.to(x.dtype)}, (x,))

    return {"torchao": call, "torchao, compiled": torch.compile(call)}


def jax_rows(tokens: int, width: int) -> Iterator[dict[str, Any]]:
    """Measure JAX, by the clock of many calls."""
    import jax
    import jax.numpy as jnp

    from jax_impl.fp8 import fp8_linear

    def of(recipe: ProductRecipe) -> Callable[..., jax.Array]:
        return lambda x, weight: fp8_linear(x, weight, recipe)

    keys = jax.random.split(jax.random.key(0), 3)
    x, gradient = (jax.random.normal(key, (tokens, width), jnp.bfloat16) for key in keys[:2])
    weight = jax.random.normal(keys[2], (width, width)) / width**0.5
    maps: dict[str, Callable[..., jax.Array]] = {"bfloat16": lambda x, weight: x @ weight.T.astype(x.dtype)}
    maps |= {f"{recipe}, {format}": of(product_recipe(format, recipe)) for format, recipe in RECIPES}
    for name, function in maps.items():
        forward = jax.jit(function)
        both = jax.jit(lambda x, weight, gradient, function=function: jax.vjp(function, x, weight)[1](gradient))
        row: dict[str, Any] = {"backend": "jax", "map": name}
        row["forward_us"] = by_clock(forward, x, weight)
        row["forward_and_backward_us"] = by_clock(both, x, weight, gradient)
        yield row


def by_clock(function: Callable[..., Any], *arrays: Any) -> float:
    """Return the least microseconds of a call of JAX, of three measurements of many calls."""
    import jax

    jax.block_until_ready(function(*arrays))
    found = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([function(*arrays) for _ in range(ROUNDS)][-1])
        found.append((time.perf_counter() - start) / ROUNDS * 1e6)
    return min(found)


if __name__ == "__main__":
    main()
