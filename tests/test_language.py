"""Test that retired words of the glossary in CONTRIBUTING.md stay out of code, documentation and notebooks."""

import io
import json
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("diptych", "kernels", "reference_torch", "jax_impl", "parity", "benchmarks", "examples", "tests")
FOLDERS = (*CODE, "docs", "notebooks")
FILES = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
RETIRED = {
    "door": r"\bdoors?\b",
    "there and back": r"\bthere and back\b",
    "twin": r"\btwins?\b",
    "rooms": r"\brooms\b",
    "house": r"\bhouse\b",
    "drill": r"drill",
    "ticks": r"\bticks?\b",
    "last places": r"\blast places\b",
    "to the last bit": r"\bto the last bit\b",
    "handed on": r"\bhand(s|ed)? on\b",
    "nobody waits": r"\bnobody waits\b",
    "proved equal": r"\bproved equal\b",
    "keep all": r"\bKEEP_ALL\b",
    "responses": r"\bresponses\b",
    "course": r"\bcourse *[=.]",
    "told": r"\btold *=|\{told",
    "lies on": r"\blies on\b",
    "idle time": r"\bidle time\b",
    "not passed on whole": r"\bpassed on whole\b",
    "weighs": r"\bweighs\b",
    "the begin": r"\bbegin of\b",
    "undivided": r"undivided",
    "linear map": r"\blinear[ _]maps?\b",
}
IDENTIFIERS = re.compile(r"told|kept|course|hands|alike|weighs|ticks?|drill|shown|speak|ways|travel", re.IGNORECASE)
"""Retired words that are ordinary English, and so are rejected only as names in code."""
NAMED_IN = (*CODE, "docs/generate")
"""Folders whose names in Python code are checked: all but the programs on pages."""
SUFFIXES = (".py", ".md", ".ipynb", ".js", ".html", ".css")


def texts() -> list[tuple[str, str]]:
    """Return the path and the text of every file; of a notebook, its cells without their outputs."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found = []
    for path in [*paths, *(ROOT / name for name in FILES)]:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if name.startswith("docs/history/") or path == Path(__file__):
            continue
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        if name == "CONTRIBUTING.md":
            text = text.partition("## Glossary")[0]
        found.append((name, text))
    return found


@pytest.fixture(scope="module")
def everything():
    return texts()


def uses(word: str, text: str) -> list[str]:
    """Return the lines of a text that use a retired word."""
    return [line.strip()[:100] for line in text.splitlines() if re.search(RETIRED[word], line, re.IGNORECASE)]


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_not_used(word, everything):
    assert len(everything) > 200
    found = {name: uses(word, text) for name, text in everything}
    assert not {name: lines for name, lines in found.items() if lines}


def names_in(text: str) -> set[str]:
    """Return the identifiers of Python code."""
    return {
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.NAME
    }


def test_a_retired_word_is_not_a_name_in_code(everything):
    code = {name: text for name, text in everything if name.startswith(NAMED_IN) and name.endswith(".py")}
    assert all(any(name.startswith(folder) for name in code) for folder in NAMED_IN)
    assert len(code) > 200
    found = {name: {word for word in names_in(text) if IDENTIFIERS.fullmatch(word)} for name, text in code.items()}
    assert not {name: words for name, words in found.items() if words}
