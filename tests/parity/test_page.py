"""The page of the comparison states what the benchmark of seeded bugs measured."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text()
BUGS = json.loads((ROOT / "benchmarks/results/locate.json").read_text())["bugs"]
NAMES = {
    "KL divergence of 0.1": "KL 0.1",
    "0.125, absolute": "0.125",
    "0.05, absolute": "0.05",
    "`torch.testing.assert_close`, defaults": "torch",
    "`numpy.allclose`, defaults": "numpy",
}


def test_the_table_of_tolerances_is_the_measured_one():
    rows = dict(re.findall(r"^\| (.*?) \| (\d+) \|$", PAGE, re.MULTILINE))
    assert rows.pop("`compare_modules`") == "0"
    assert rows == {words: str(sum(bug["accepted"][key] for bug in BUGS)) for words, key in NAMES.items()}
    assert f"accepted bugs of {len(BUGS)}" in PAGE


def test_every_bug_is_located():
    assert all(bug["is_right"] for bug in BUGS)
    assert "nine pairs" in PAGE
    assert len({bug["pair"] for bug in BUGS}) == 9
    assert f"puts {len(BUGS)} bugs" in PAGE
    readme = (ROOT / "README.md").read_text()
    assert f"{len(BUGS)} seeded bugs in 9 pairs: all located" in readme
