"""The page in a headless Chromium: what is drawn, where, and what it does when somebody points, chooses and types.

Skipped where there is no browser: see tests/planner/browser.py for which are looked for. Positions are compared in
pixels, with the planner's numbers, not with the page's.
"""

import io
import os
import signal

import matplotlib.image
import numpy as np
import pytest

from diptych.planner.memory.ranks import rank_memories
from diptych.planner.memory.stages import predict_stages
from diptych.planner.step_time import step_time
from diptych.planner.timeline import COLORS
from diptych.plans.schedule.messages import dependencies
from diptych.plans.schedule.named import schedule_for
from diptych.plans.schedule.simulate import simulate
from tests.planner.browser import INSTALL, Browser, BrowserError, find_browser
from tests.planner.page_cases import REQUESTS, actions_of, costs_of, described
from tests.planner.page_in_browser import NARROW, PIXEL, WIDE, cells, check_places, choose, text

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_browser() is None, reason=f"needs a headless Chromium: {INSTALL}"),
]


@pytest.mark.parametrize("name", REQUESTS)
def test_every_action_is_a_cell_where_the_simulation_has_it(name, browser, show):
    entry = show(name)["schedules"][0]
    simulation = simulate(schedule_for(REQUESTS[name].config, REQUESTS[name].num_microbatches), costs_of(entry))
    assert len(cells(browser)) == len(simulation.starts)
    check_places(browser, entry)


def test_kinds_have_the_colours_of_the_pictures(browser, show):
    show("pipeline")
    wanted = {kind: [int(color[i : i + 2], 16) for i in (1, 3, 5)] for kind, color in COLORS.items()}
    kinds = {cell["kind"]: cell["fill"] for cell in cells(browser)}
    probe = (
        "(() => {{ const c = document.createElement('canvas').getContext('2d'); c.fillStyle = {!r};"
        "c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); }})()"
    )
    seen = {kind: browser.evaluate(probe.format(fill)) for kind, fill in kinds.items()}
    assert seen == {kind: wanted[kind] for kind in "FIW"}


@pytest.mark.parametrize("name", ["pipeline", "uneven", "alone"])
def test_peaks_are_the_planners(name, browser, show):
    """The mark of each rank says the planner's bytes, and stands on the top of what is drawn, where that is highest."""
    data, request = show(name), REQUESTS[name]
    schedule = schedule_for(request.config, request.num_microbatches)
    ranks = rank_memories(request.config, schedule, predict_stages(request.config, request.micro_batch_size))
    marks = browser.evaluate(
        "[...document.querySelectorAll('.peak-mark')].map(m => ({...m.dataset, y: m.getBoundingClientRect().bottom,"
        "x: m.getBoundingClientRect().x + m.getBoundingClientRect().width / 2}))"
    )
    labels = browser.evaluate("[...document.querySelectorAll('.peak-text')].map(t => t.textContent)")
    tops = browser.evaluate(
        "[...document.querySelectorAll('#chart .saved')].map(k => Math.min(k.getBoundingClientRect().top,"
        "k.nextElementSibling?.matches('.waiting') ? k.nextElementSibling.getBoundingClientRect().top : 1e9))"
    )
    found, entry = cells(browser), data["schedules"][0]
    scale = (found[-1]["right"] - found[0]["left"]) / (
        entry["actions"]["start"][-1] + costs_of(entry).time(actions_of(entry)[-1][1])
    )
    unit = {"GiB": 2**30, "MiB": 2**20}[data["memoryUnit"]["name"]]
    for rank, memory in enumerate(ranks):
        assert (marks[rank]["rank"], marks[rank]["bytes"]) == (str(rank), str(memory.total))
        assert labels[rank] == f"peak {memory.total / unit:,.1f} {data['memoryUnit']['name']}"
        assert marks[rank]["y"] == pytest.approx(tops[rank], abs=PIXEL)
        assert marks[rank]["x"] == pytest.approx(found[0]["left"] + scale * entry["ranks"][rank]["peakTime"], abs=PIXEL)
    largest = max(memory.total for memory in ranks)
    assert text(browser, "#peak").startswith(f"{largest / unit:,.1f} {data['memoryUnit']['name']}")


def test_the_part_computed_again_is_as_long_as_predicted(browser, show):
    entry = show("pipeline")["schedules"][0]
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.again')].map(a => [a.previousElementSibling.id,"
        "a.getBoundingClientRect().width, a.previousElementSibling.getBoundingClientRect().width,"
        "a.getBoundingClientRect().left - a.previousElementSibling.getBoundingClientRect().left])"
    )
    backwards = [f"a{n}" for n, kind in enumerate(entry["actions"]["kind"]) if kind == "I"]
    assert sorted(name for name, *_ in boxes) == sorted(backwards)
    for name, again, whole, away in boxes:
        stage = entry["stages"][entry["actions"]["stage"][int(name[1:])]]
        assert again / whole == pytest.approx(stage["recomputed"] / stage["I"], abs=0.02)
        assert 0.1 < again / whole < 0.9
        assert away == pytest.approx(0.0, abs=PIXEL)


def test_a_microbatch_followed_stays_bright_and_its_steps_come_in_order(browser, show):
    request = REQUESTS["pipeline"]
    entry = show("pipeline")["schedules"][0]
    schedule = schedule_for(request.config, request.num_microbatches)
    assert {cell["opacity"] for cell in cells(browser)} == {1.0}
    choose(browser, 4)
    for cell in cells(browser):
        assert (cell["opacity"] == 1.0) == (cell["microbatch"] == "4"), cell
        assert cell["opacity"] in (1.0, 0.16)
    assert text(browser, "#followed") == "4"
    listed = browser.evaluate("[...document.querySelectorAll('#steps button')].map(b => Number(b.dataset.action))")
    actions = [actions_of(entry)[number][1] for number in listed]
    assert sorted(actions) == sorted(a for _, a in actions_of(entry) if a.microbatch == 4)
    for place, action in enumerate(actions):
        assert all(needed in actions[:place] for needed in dependencies(schedule, action))
    sent = browser.evaluate(
        "[...document.querySelectorAll('.message[data-from]')].map(m => [m.dataset.from, m.dataset.to])"
    )
    pairs = {(actions_of(entry)[int(a)][1], actions_of(entry)[int(b)][1]) for a, b in sent}
    assert pairs == {(a, b) for b in actions for a in dependencies(schedule, b) if a.stage != b.stage}
    for place, action in enumerate(actions):
        told_now = text(browser, "#description")
        assert told_now.startswith(f"Step {place + 1} of {len(actions)}. ")
        assert f"of microbatch 4 on stage {action.stage} " in told_now
        assert browser.evaluate("document.querySelectorAll('[aria-current=step]').length") == 1
        now = browser.evaluate("document.querySelector('[aria-current=step]').dataset.action")
        assert actions_of(entry)[int(now)][1] == action
        browser.evaluate("document.getElementById('next').click()")
    assert browser.evaluate("document.getElementById('next').disabled")
    browser.evaluate("document.getElementById('leave').click()")
    assert {cell["opacity"] for cell in cells(browser)} == {1.0}
    assert browser.evaluate("document.getElementById('follow').hidden")


def test_playing_goes_from_step_to_step_and_stops(browser, show):
    show("alone")
    browser.evaluate("document.getElementById('play').click()")
    assert text(browser, "#play") == "Pause"
    assert text(browser, "#description").startswith("Step 1 of 2. Forward of microbatch 0")
    browser.evaluate(
        "new Promise(done => { const text = document.getElementById('description'), until = Date.now() + 15000;"
        "(function look() { text.textContent.startsWith('Step 2') || Date.now() > until ? done(0)"
        ": setTimeout(look, 50) })() })"
    )
    assert text(browser, "#description").startswith("Step 2 of 2. Backward of microbatch 0")
    browser.evaluate("document.getElementById('play').click()")
    assert text(browser, "#play") == "Play"


def seconds(words: str) -> float:
    number, unit = words.split()
    return float(number.replace(",", "")) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def test_another_schedule_has_the_simulators_makespan_and_bubble(browser, show):
    data = show("pipeline")
    bars = browser.evaluate("[...document.querySelectorAll('#schedules label')].map(b => b.dataset.name)")
    assert bars == [schedule["name"] for schedule in data["schedules"]]
    seen = set()
    for place, entry in enumerate(data["schedules"]):
        if place % 2:
            browser.evaluate(f"document.querySelectorAll('#schedules input')[{place}].click()")
        else:
            browser.evaluate(
                f"(() => {{ const s = document.getElementById('schedule'); s.value = {place};"
                "s.dispatchEvent(new Event('change')); })()"
            )
        browser.settle()
        said = browser.evaluate("document.getElementById('makespan').firstChild.textContent")
        seen.add(said)
        assert seconds(said) == pytest.approx(entry["makespan"], rel=1e-3)
        idle = browser.evaluate("document.getElementById('idle').firstChild.textContent")
        assert idle == f"{100 * entry['idle']:.1f}%"
        assert browser.evaluate("document.querySelectorAll('#schedules input:checked').length") == 1
        check_places(browser, entry)
    assert len(seen) >= 7
    step = step_time(REQUESTS["pipeline"].config, 2, 6)
    assert data["schedules"][0]["makespan"] == step.simulation.makespan


def test_schedules_share_one_axis_until_they_are_not_to(browser, show):
    data = show("pipeline")
    places = [n for n, each in enumerate(data["schedules"]) if each["name"] in ("zb-h1", "gpipe", "zb-v")]
    widths = {}
    for place in places:
        browser.evaluate(f"document.querySelectorAll('#schedules input')[{place}].click()")
        found = cells(browser)
        widths[place] = max(c["right"] for c in found) - min(c["left"] for c in found)
    spans = {place: data["schedules"][place]["makespan"] for place in places}
    for place in places[1:]:
        assert widths[place] / widths[places[0]] == pytest.approx(spans[place] / spans[places[0]], rel=2e-3)
    browser.evaluate("document.getElementById('same').click()")
    found, frame = cells(browser), browser.evaluate("document.getElementById('frame').clientWidth")
    assert max(c["right"] for c in found) - min(c["left"] for c in found) > 0.85 * frame


def test_keys_go_from_cell_to_cell_follow_and_zoom(browser, show):
    entry = show("pipeline")["schedules"][0]
    first = [entry["actions"]["rank"].index(rank) for rank in range(4)]

    def at() -> str:
        return browser.evaluate("document.getElementById('chart').getAttribute('aria-activedescendant')")

    browser.evaluate("document.getElementById('chart').focus()")
    assert browser.evaluate("document.activeElement.id") == "chart"
    for key, place in (
        ("ArrowRight", 0),
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", first[1] - 1),
    ):
        browser.press(key)
        assert at() == f"a{place}"
    browser.press("ArrowRight")
    assert at() == f"a{first[1] - 1}", "there is no further one on this rank"
    browser.press("Home")
    browser.press("ArrowDown")
    _, action = actions_of(entry)[int(at()[1:])]
    assert action.stage == 1
    assert text(browser, "#description").startswith(f"Forward of microbatch {action.microbatch} on stage 1 ")
    assert "waited for" in text(browser, "#description")
    browser.press("Enter")
    assert text(browser, "#followed") == str(action.microbatch)
    before = cells(browser)[0]
    browser.press("+")
    after = cells(browser)[0]
    ratio = (after["right"] - after["left"]) / (before["right"] - before["left"])
    assert ratio == pytest.approx(1.6, rel=0.01)
    browser.press("0")
    check_places(browser, entry)
    browser.press("Escape")
    assert text(browser, "#followed") == "none"
    assert {cell["opacity"] for cell in cells(browser)} == {1.0}


def test_pointing_tells_and_clicking_follows(browser, show):
    entry = show("offloaded")["schedules"][0]
    browser.evaluate("document.getElementById('chart').scrollIntoView()")
    target = next(c for c in cells(browser) if (c["kind"], c["stage"], c["microbatch"]) == ("B", "0", "1"))
    place = (target["left"] + target["right"]) / 2, (target["top"] + target["bottom"]) / 2
    browser.point(*place)
    said = text(browser, "#description")
    assert said.startswith("Backward of microbatch 1 on stage 0 (embedding + layers 0 to 3), rank 0: ")
    assert "waited for 1B1 from rank 1" in said or "its last input, 1B1" in said
    always = entry["ranks"][0]["memory"]
    assert browser.evaluate("document.querySelector('.held').textContent") != "memory", f"of {always}"
    browser.point(*place, click=True)
    assert text(browser, "#followed") == "1"


@pytest.mark.parametrize("name", ["offloaded", "alone"])
def test_copies_are_drawn_on_a_lane_of_their_own(name, browser, show):
    entry = show(name)["schedules"][0]
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.copy')].map(c => ({...c.dataset, late: c.matches('.late'),"
        "left: c.getBoundingClientRect().left, right: c.getBoundingClientRect().right,"
        "top: c.getBoundingClientRect().top}))"
    )
    boxes = [box for box in boxes if "copy" in box]
    found, copies = cells(browser), entry["copies"]["ranks"]
    assert len(boxes) == sum(len(rank["begin"]) for rank in copies) > 9
    scale = (found[-1]["right"] - found[0]["left"]) / (
        entry["actions"]["start"][-1] + costs_of(entry).time(actions_of(entry)[-1][1])
    )
    end = entry["makespan"] + entry["gradients"] + entry["update"]
    for box in boxes:
        rank, place = copies[int(box["rank"])], int(box["copy"])
        assert box["left"] == pytest.approx(found[0]["left"] + scale * rank["begin"][place], abs=PIXEL)
        assert box["right"] == pytest.approx(found[0]["left"] + scale * min(end, rank["end"][place]), abs=PIXEL)
        assert box["late"] == bool(rank["late"][place])
        assert box["top"] > max(cell["bottom"] for cell in found if cell["rank"] == box["rank"])
    marks = sum(len(rank["marks"]["time"]) for rank in copies) if entry["copies"]["activations"] else 0
    assert browser.evaluate("document.querySelectorAll('#chart .mark').length") == marks
    said = text(browser, "#offload-words")
    assert ("it does." in said, "it does not." in said) == (False, True)
    browser.evaluate("document.getElementById('copies').click()")
    assert browser.evaluate("document.querySelectorAll('#chart .copy').length") == 0


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", ["pipeline", "offloaded"])
def test_nothing_is_wider_than_the_window(name, size, browser, show):
    show(name, size)
    choose(browser, 2)
    browser.settle()
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    wide = browser.evaluate(
        "[...document.querySelectorAll('main *, header *')].filter(e => !e.closest('.scroll, svg')"
        "&& e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    check_places(browser, described(name)["schedules"][0])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_screenshot_shows_cells_on_paper(dark, browser, show):
    show("pipeline", WIDE, dark)
    browser.evaluate("document.getElementById('chart').scrollIntoView()")
    browser.settle()
    picture = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3]
    assert picture.shape[:2] == WIDE[::-1]
    assert (picture[3, 3].mean() < 0.2) == dark
    for kind in "FW":
        color = np.array([int(COLORS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(picture - color).max(-1) < 0.02).mean() > 0.002, kind
    assert len(np.unique((picture[::3, ::3] * 255).astype(int).reshape(-1, 3), axis=0)) > 30
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("document.documentElement.dataset.theme") == ("light" if dark else "dark")


def test_controls_have_names(browser, show):
    show("offloaded")
    nameless = browser.evaluate(
        "[...document.querySelectorAll('button, select, input, #chart')].filter(e => !(e.textContent.trim() ||"
        "e.getAttribute('aria-label') || e.labels?.length)).map(e => e.id)"
    )
    assert nameless == []
    assert text(browser, "h1") == "1f1b: 4 microbatches on 2 ranks"
    assert browser.evaluate("document.title") == "1f1b: 4 microbatches on 2 ranks"
    assert "16 actions" in browser.evaluate("document.getElementById('chart').getAttribute('aria-label')")


def test_a_browser_that_ends_is_an_error_and_not_a_wait(tmp_path):
    gone = Browser(find_browser() or "", tmp_path)
    os.killpg(gone.process.pid, signal.SIGKILL)
    gone.process.wait(30)
    with pytest.raises(BrowserError, match=r"Runtime\.evaluate: expected an answer, but the browser has ended"):
        gone.evaluate("1")
    gone.close()
