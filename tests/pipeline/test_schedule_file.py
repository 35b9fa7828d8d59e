"""Schedules as files: read as they were written, by this project and by torch.distributed.pipelining, either way."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.distributed.pipelining import schedules as theirs

from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.actions import Action, ScheduleError
from diptych.plans.schedule.csv import read_schedule, schedule_from_csv, schedule_to_csv
from diptych.plans.schedule.named import build_schedule, schedule_for
from diptych.plans.schedule.simulate import simulate
from diptych.plans.schedule.validate import validate_schedule
from parity.cli.main import main
from reference_torch.rank_pool import RankPool
from tests.pipeline import schedule_file_jobs
from tests.pipeline.jobs import TINY, Case
from tests.pipeline.schedules import ANY
from tests.pipeline.support import equal_to_unsharded


@given(ANY)
def test_what_is_written_is_read(arguments):
    schedule = build_schedule(*arguments)
    found = schedule_from_csv(schedule_to_csv(schedule), schedule.name)
    # One rank, or one stage a rank, lies the same either way.
    assert replace(found, placement=schedule.placement) == schedule
    assert [found.rank_of(s) for s in range(found.num_stages)] == [schedule.rank_of(s) for s in range(found.num_stages)]


def made_by_torch(name: str, p: int, m: int, v: int):
    """A schedule of torch.distributed.pipelining, without its stages' work."""
    stages = [
        SimpleNamespace(
            group_size=p,
            group_rank=0,
            num_stages=p * v,
            stage_index=index * p,
            is_first=index == 0,
            is_last=False,
            has_backward=True,
            group=None,
            device="cpu",
            stage_index_to_group_rank={},
            submod=torch.nn.Identity(),
        )
        for index in range(v)
    ]
    return getattr(theirs, name)(stages, m, loss_fn=lambda output, target: output)


def written_by_torch(name: str, p: int, m: int, v: int) -> str:
    order = made_by_torch(name, p, m, v).pipeline_order
    return "\n".join(",".join("" if a is None else str(a) for a in order[rank]) for rank in range(p))


@pytest.mark.parametrize(
    ("peer", "ours"),
    [
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb1p"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("ScheduleDualPipeV", "dualpipe-v"),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 12), (6, 12)])
def test_schedules_of_one_name_are_the_same_action_by_action(peer, ours, p, m):
    found = schedule_from_csv(written_by_torch(peer, p, m, 2), ours)
    assert found == build_schedule(ours, p, m, 2)


def makespan_of_pairs(text: str) -> float:
    """F = I = W = 1, no communication; a pair begins when both of its actions can, and both end with it."""
    rows = [
        [
            [Action(kind, int(stage), int(i)) for stage, kind, i in re.findall(r"(\d+)([FBIW])(\d+)", cell)]
            for cell in row.split(",")
            if cell
        ]
        for row in text.strip().split("\n")
    ]
    last = max(action.stage for row in rows for cell in row for action in cell)
    ends: dict[tuple[str, int, int], int] = {}
    free, places = [0] * len(rows), [0] * len(rows)
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                cell = row[places[rank]]
                needed = [need for action in cell for need in needs(action, last)]
                if not all(need in ends for need in needed):
                    break
                start = max([free[rank], *(ends[need] for need in needed)])
                free[rank] = start + sum(2 if action.kind == "B" else 1 for action in cell)
                places[rank] += 1
                ends |= {("B" if a.kind == "I" else a.kind, a.stage, a.microbatch): free[rank] for a in cell}
    return max(free)


def needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    kind, stage, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] * (stage > 0)
    if kind == "W":
        return [("B", stage, microbatch)]
    return [("F", stage, microbatch)] + [("B", stage + 1, microbatch)] * (stage < last)


def test_dualpipe_v_by_the_way_it_is_counted():
    """54 units where a forward and the backward beside it are one action; taking turns, 51."""
    text = written_by_torch("ScheduleDualPipeV", 4, 8, 2)
    assert text.count("OVERLAP_F_B") > 8
    assert makespan_of_pairs(text) == 54
    assert makespan_of_pairs(schedule_to_csv(build_schedule("dualpipe-v", 4, 8, 2))) == 51
    assert makespan_of_pairs(schedule_to_csv(build_schedule("zb-v", 4, 8, 2))) == 51


@pytest.mark.parametrize("peer", ["ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"])
def test_schedules_that_only_torch_has_are_valid_here(peer):
    schedule = schedule_from_csv(written_by_torch(peer, 4, 8, 2))
    validate_schedule(schedule, "blocking")
    assert schedule.splits_backward == (peer == "ScheduleInterleavedZeroBubble")
    assert simulate(schedule).makespan == {"ScheduleInterleavedZeroBubble": 51, "ScheduleLoopedBFS": 57}[peer]


@pytest.mark.parametrize(
    ("name", "v"),
    [("zb-h1", 1), ("zb-h2", 1), *((name, 2) for name in ("interleaved", "zb-v", "v-half", "v-min", "dualpipe-v"))],
)
def test_torch_reads_what_is_written_here(name, v, tmp_path):
    schedule = build_schedule(name, 4, 8, v)
    path = tmp_path / "schedule.csv"
    path.write_text(schedule_to_csv(schedule))
    peer = made_by_torch("ScheduleInterleaved1F1B", 4, 8, v)
    theirs.PipelineScheduleMulti._load_csv(peer, str(path))
    assert [[str(a) for a in peer.pipeline_order[rank]] for rank in range(4)] == [
        [str(a) for a in actions] for actions in schedule.actions
    ]
    assert peer.stage_index_to_group_rank == {stage: schedule.rank_of(stage) for stage in range(4 * v)}


REFUSED = {
    "": r"expected a row of actions for each rank, got none",
    "0F0,0X0": r"row 0, cell 1: expected stage, one of F, B, I and W, and microbatch, as in '0F1', got '0X0'$",
    "0F0,0B0\n1F": r"row 1, cell 0: expected stage, .* got '1F'$",
    "0F0,0SEND_F0": r"row 0, cell 1: .* got '0SEND_F0'; save only computations, without messages",
    "0F0,0F99999999999,0B0": r"expected microbatch numbers from 0 on .* of 3 actions, got 0F99999999999",
    "1000000000F0": r"expected stage numbers from 0 on without gaps in a schedule of 1 actions, got 1000000000F0",
    "0F0,0B0\n,,\n1F0,1B0": r"schedule, row 1: expected a rank's actions, got none",
    '"' + "0" * 200_000: r"expected rows of cells with commas between them, got field larger than field limit",
    "0F0,0B0\n2F0,2B0\n1F0,1B0": r"expected stage s on rank s mod 3, or V-shaped placement .*, got "
    r"rank 0: 0; rank 1: 2; rank 2: 1",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_schedule_is_refused_by_name(text):
    with pytest.raises(ValueError, match=REFUSED[text]):
        schedule_from_csv(text)


def written(path, name: str = "v-half", p: int = 2, m: int = 4) -> TransformerConfig:
    path.write_text(schedule_to_csv(build_schedule(name, p, m, 2)))
    return replace(
        TINY,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule_file=read_schedule(path),
    )


def test_a_configuration_takes_its_schedule_from_a_file(tmp_path):
    config = written(tmp_path / "own.csv")
    assert schedule_for(config, 4) == replace(build_schedule("v-half", 2, 4, 2), name="file")
    assert schedule_for(config, 4, forward_only=True).actions == build_schedule("v-half", 2, 4, 2, None, True).actions
    with pytest.raises(ValueError, match="num_microbatches: expected the 4 that pipeline_schedule_file has, got 5"):
        schedule_for(config, 5)


def test_a_file_that_changes_is_read_again_by_the_next_configuration_alone(tmp_path):
    """What is run does not change under a run."""
    path = tmp_path / "own.csv"
    config = written(path)
    for text in (schedule_to_csv(build_schedule("v-min", 2, 5, 2)), "0F0,", "no schedule at all"):
        path.write_text(text)
        assert schedule_for(config, 4).actions == build_schedule("v-half", 2, 4, 2).actions
    assert schedule_for(written(path, "v-min", m=5), 5).actions == build_schedule("v-min", 2, 5, 2).actions


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n  ,,\n", "\r\n\r\n"])
def test_blank_lines_at_the_end_are_no_ranks(end, tmp_path):
    text = schedule_to_csv(build_schedule("1f1b", 2, 3)).strip()
    assert schedule_from_csv(text.replace("\n", end[:2].strip(" ") if "\r" in end else "\n") + end).pp_size == 2
    (tmp_path / "marked.csv").write_text(text, encoding="utf-8-sig")
    assert read_schedule(tmp_path / "marked.csv").actions == build_schedule("1f1b", 2, 3).actions


def test_three_passes_of_a_v_shaped_placement_are_refused():
    swapped = str.maketrans("23", "32")  # stages: 0 3 4 and 1 2 5
    rows = schedule_to_csv(build_schedule("interleaved", 2, 4, 3)).split()
    rows = [",".join(cell[0].translate(swapped) + cell[1:] for cell in row.split(",")) for row in rows]
    with pytest.raises(ValueError, match="or V-shaped placement"):
        schedule_from_csv("\n".join(rows))


def test_a_file_is_not_ignored_where_context_ranks_have_an_order():
    with pytest.raises(ValueError, match="pipeline_schedule_file: expected None with cp_exchange 'pipelined', which"):
        replace(
            TINY,
            context_parallel_size=2,
            cp_exchange="pipelined",
            pipeline_schedule_file=build_schedule("1f1b", 2, 2),
        )


def test_one_row_is_no_pipeline(tmp_path):
    (tmp_path / "one.csv").write_text("0F0,1F0,1B0,0B0")
    with pytest.raises(
        ValueError, match=r"pipeline_schedule_file: expected at least two rows \(one per rank\), got one"
    ):
        replace(TINY, pipeline_schedule_file=read_schedule(tmp_path / "one.csv"))


FAULTY = {
    "an action missing": (lambda text: text.replace("0F0,", "", 1), "rank 0, 0F0: expected once, got none"),
    "a weight before its input": (lambda text: text.replace("3I0,", "").replace("3W0", "3W0,3I0"), "cannot run 3W0"),
    "no action": (lambda _: "0F0;0B0", "row 0, cell 0"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_file_with_a_fault_is_refused_with_its_name(tmp_path, fault):
    edit, message = FAULTY[fault]
    path = tmp_path / "own.csv"
    written(path)
    path.write_text(edit(path.read_text()))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*{message}"):
        read_schedule(path)


def test_a_table_with_a_fault_is_refused_by_the_configuration():
    schedule = build_schedule("1f1b", 2, 2)
    faulty = replace(schedule, actions=(schedule.actions[0][1:], schedule.actions[1]))
    message = "pipeline_schedule_file: expected a schedule that runs, got one with a fault: rank 0, 0F0: expected once"
    with pytest.raises(ValueError, match=message):
        replace(TINY, pipeline_model_parallel_size=2, pipeline_schedule_file=faulty)


@pytest.mark.parametrize("content", [None, "0F0;0B0"])
def test_the_command_line_names_a_file_that_is_no_schedule(tmp_path, capsys, content):
    path = tmp_path / "none.csv"
    if content is not None:
        path.write_text(content)
    assert main(["plan", "--pipeline-model-parallel-size", "2", "--pipeline-schedule-file", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("diptych: --pipeline-schedule-file: expected a schedule that runs, got ")
    assert str(path) in message
    assert message.count("\n") == 1


def test_errors_of_a_file_are_those_of_the_validator():
    with pytest.raises(ScheduleError, match="rank 1, 1B0: expected once, got none"):
        validate_schedule(schedule_from_csv("0F0,0B0\n1F0"))


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name", ["zb-v", "v-min", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v-half", "dualpipe-v"))]
)
def test_torchs_runtime_runs_what_is_written_here(two, name, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(schedule_to_csv(build_schedule(name, 2, 4, 2)))
    expected = schedule_file_jobs.unsharded(4, 4)
    found = {}
    for of_rank in two.run("tests.pipeline.schedule_file_jobs:by_the_peers_runtime", str(path)):
        found |= of_rank
    assert found.keys() == expected.keys()
    for stage, gradients in expected.items():
        for ours, theirs_ in zip(gradients, found[stage], strict=True):
            np.testing.assert_allclose(theirs_, ours, rtol=1e-12, atol=1e-14)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "text",
    [
        "0F1,0F0,0B0,0B1\n1F0,1F1,1B0,1B1",
        "0F2,0F0,0B2,0F1,0B0,0B1\n1F2,1I2,1F0,1B0,1W2,1F1,1B1",
        "0F1,0F0,0F2,0B1,0B2,0B0\n1F1,1B1,1F2,1F0,1B2,1B0",
    ],
)
def test_microbatches_may_come_in_any_order(two, text, tmp_path):
    """Each with its own tokens, targets and dropout, on every stage; losses are reported in their own order."""
    path = tmp_path / "own.csv"
    path.write_text(text)
    config = replace(TINY, pipeline_model_parallel_size=2, pipeline_schedule_file=read_schedule(path))
    equal_to_unsharded(two, {text: Case(config, 1 + max(int(a[2]) for a in text.replace("\n", ",").split(",")))})


@pytest.mark.multiprocess
def test_what_torch_writes_runs_here(two, tmp_path):
    """Its interleaved zero bubble, read from a file."""
    path = tmp_path / "theirs.csv"
    path.write_text(written_by_torch("ScheduleInterleavedZeroBubble", 2, 4, 2))
    config = replace(
        TINY,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_schedule_file=read_schedule(path),
    )
    equal_to_unsharded(two, {"by a file": Case(config, 4)})
