"""A page that explains a plan: one HTML file with the schedule's timeline, memory, recompute and copies.

The file contains its data, style and program and loads nothing. Equal plans give identical files.
"""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from diptych.planner.page.data import MOST_PIECES, WITH_OTHERS, PageRequest, describe_plan
from diptych.planner.timeline import COLORS

__all__ = ["MOST_PIECES", "WITH_OTHERS", "PageRequest", "describe_plan", "page_html", "write_page"]

SCRIPTS = ("format.js", "simulation.js", "timeline.js", "describe.js", "tables.js", "main.js")
"""Scripts of the page, in order; later scripts use earlier ones."""


def page_html(data: dict[str, Any]) -> str:
    """Return the HTML of the page.

    Args:
        data: result of describe_plan.
    """
    here = files("diptych.planner.page")
    colors = " ".join(f"--{kind}: {color};" for kind, color in COLORS.items())
    script = "\n".join(here.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    parts = {
        "title": escape(data["title"]),
        "style": here.joinpath("style.css").read_text("utf-8").replace("/* colors */", colors),
        "data": as_script_data(data),
        "script": script,
    }
    template = here.joinpath("template.html").read_text("utf-8")
    for name, text in reversed(parts.items()):  # later parts first, so that inserted text is not searched
        before, mark, after = template.partition("{{" + name + "}}")
        assert mark, f"the template has a place for its {name}"
        template = before + text + after
    return template


def as_script_data(data: Any) -> str:
    """Return JSON that cannot close the script element around it, whatever its strings contain.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def write_page(path: Path, request: PageRequest) -> None:
    """Write the page about a plan.

    Args:
        path: file to write, .html.
        request: the plan to describe.

    Raises:
        ValueError: the file's name does not end in .html, or describe_plan refuses the request.
    """
    if path.suffix != ".html":
        raise ValueError(f"path: expected a name that ends in .html, got {str(path)!r}")
    path.write_text(page_html(describe_plan(request)), "utf-8")
