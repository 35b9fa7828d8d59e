"""What tests of the page in a browser share: its cells, as they lie, and where they should."""

from typing import Any

import numpy as np

from tests.planner.browser import Browser
from tests.planner.page_cases import actions_of, costs_of

WIDE, NARROW = (1280, 900), (390, 760)
PIXEL = 0.75
"""Pixels that a place may be off."""


CELLS = """[...document.querySelectorAll('.cell')].map(cell => {
  const box = cell.getBoundingClientRect(), style = getComputedStyle(cell);
  return {...cell.dataset, id: cell.id, left: box.left, right: box.right, top: box.top, bottom: box.bottom,
          opacity: Number(style.opacity), fill: style.fill};
})"""


def cells(browser: Browser) -> list[dict[str, Any]]:
    """Every cell as it is on the screen, in the order of the columns that the page was given."""
    return sorted(browser.evaluate(CELLS), key=lambda cell: int(cell["id"][1:]))


def choose(browser: Browser, microbatch: int) -> None:
    """Move the slider, as a hand would."""
    browser.evaluate(
        f"(() => {{ const s = document.getElementById('microbatch'); s.value = {microbatch};"
        "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def text(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({selector!r}).textContent")


def check_places(browser: Browser, entry: dict[str, Any]) -> None:
    """Every cell is as long and where the simulation has it, in its rank's row, and says what it is."""
    schedule_costs, found = costs_of(entry), cells(browser)
    start_of = {action: start for (_, action), start in zip(actions_of(entry), entry["actions"]["start"], strict=True)}
    assert len(found) == len(start_of)
    starts = np.array([start_of[action] for _, action in actions_of(entry)])
    lasts = np.array([schedule_costs.time(action) for _, action in actions_of(entry)])
    left, right = (np.array([cell[side] for cell in found]) for side in ("left", "right"))
    last = int((starts + lasts).argmax())
    scale = (right[last] - left[0]) / (starts[last] + lasts[last] - starts[0])
    assert scale * entry["makespan"] > 150, "seen at all"
    np.testing.assert_allclose(left, left[0] + scale * (starts - starts[0]), atol=PIXEL)
    np.testing.assert_allclose(right - left, scale * lasts, atol=PIXEL)
    rows: dict[int, set[float]] = {}
    for cell, (rank, action) in zip(found, actions_of(entry), strict=True):
        rows.setdefault(rank, set()).add(cell["top"])
        said = cell["rank"], cell["kind"], cell["stage"], cell["microbatch"]
        assert said == (str(rank), action.kind, str(action.stage), str(action.microbatch))
    tops = [rows[rank] for rank in sorted(rows)]
    assert all(len(top) == 1 for top in tops)
    assert sorted(tops, key=min) == tops
