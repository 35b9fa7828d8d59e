"""A page that explains a plan: one HTML file with the schedule's timeline, memory, recomputing and copies.

The file needs nothing else: its data, style and program are in it, and it may load nothing. The same plan gives the
same file, to the byte.
"""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from diptych.planner.page.data import MOST_PIECES, WITH_OTHERS, PageRequest, describe_plan
from diptych.planner.timeline import COLORS

__all__ = ["MOST_PIECES", "WITH_OTHERS", "PageRequest", "describe_plan", "page_html", "write_page"]

SCRIPTS = ("format.js", "course.js", "timeline.js", "tell.js", "tables.js", "main.js")
"""Parts of the page's program, in order; later ones use earlier ones."""


def page_html(data: dict[str, Any]) -> str:
    """The page.

    Args:
        data: as describe_plan gives it.
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
    for name, text in reversed(parts.items()):  # later parts first: what is put in is not searched
        before, mark, after = template.partition("{{" + name + "}}")
        assert mark, f"the template has a place for its {name}"
        template = before + text + after
    return template


def as_script_data(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever its strings hold.

    Raises:
        ValueError: a number that is not finite.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def write_page(path: Path, request: PageRequest) -> None:
    """Write the page about a plan.

    Args:
        path: to write to, .html.
        request: what it is about.

    Raises:
        ValueError: the file's name ends otherwise; or as describe_plan.
    """
    if path.suffix != ".html":
        raise ValueError(f"path: expected a name that ends in .html, got {str(path)!r}")
    path.write_text(page_html(describe_plan(request)), "utf-8")
