"""diptych plan: schedules written and read again, pictures, what ranks hold, send and keep."""

import json
import re

import pytest

from diptych.planner.memory.rank_peaks import rank_peaks
from diptych.planner.memory.ranks import rank_memories
from diptych.planner.memory.stages import predict_stages
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.named import schedule_for
from tests.command import diptych


def test_a_schedule_that_plan_wrote_is_planned_again(tmp_path, capsys):
    shape = "plan --num-layers 4 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"
    path = tmp_path / "new" / "schedule.csv"
    assert diptych(f"{shape} --schedule zb-v --num-microbatches 4 --write-schedule", path) == 0
    written, printed = path.read_text(), capsys.readouterr().out
    assert written.startswith("0F0,0F1,0F2,3F0,3I0,3W0,")
    assert diptych(f"{shape} --num-microbatches 4 --pipeline-schedule-file", path) == 0
    again = capsys.readouterr().out
    assert "pipeline: file, 2 ranks of 2 virtual stages" in again
    assert re.search(r"makespan (\S+)", printed)[1] == re.search(r"makespan (\S+)", again)[1]
    assert diptych(f"{shape} --num-microbatches 5 --pipeline-schedule-file", path) == 2
    assert "--num-microbatches: expected the 4 that --pipeline-schedule-file has, got 5" in capsys.readouterr().err


def test_plan_makes_the_folder_of_its_picture(tmp_path, capsys):
    picture = tmp_path / "new" / "plan.svg"
    assert diptych("plan --pipeline-model-parallel-size 2 --picture", picture) == 0
    assert f"written: {picture}" in capsys.readouterr().out.replace("\n", "")
    assert picture.read_text().startswith("<?xml")


def test_plan_shows_what_ranks_that_share_sequences_hold_and_send(capsys):
    command = "plan --num-layers 4 --layer-pattern kda,kda,kda,attention --context-parallel-size 4 --seq-length 4096"
    assert diptych(f"{command} --micro-batch-size 3 --cp-exchange scan") == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["2", "6,144 to 9,215", "1 to 2", "2,048", "1"] in rows
    assert ["ring", "3", "16.0", "48.0", "144.0"] in rows
    assert ["scan *", "3", "80.0", "176.0", "528.0"] in rows
    assert diptych("plan --context-parallel-size 3 --micro-batch-size 1 --seq-length 16") == 2
    assert "--context-parallel-size: expected a divisor of a microbatch's 1 x 16 tokens" in capsys.readouterr().err


def test_plan_says_what_zigzag_attention_computes_and_moves(capsys):
    """Parts of 1,024 tokens of 4 x 32 numbers; ranks 1 and 3 move both halves of theirs, 0 and 2 one."""
    command = "plan --num-layers 2 --layer-pattern kda,attention --context-parallel-size 4 --seq-length 4096"
    assert diptych(f"{command} --micro-batch-size 1 --cp-attention-layout zigzag") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Its layout is zigzag: a rank computes scores of 2,359,296 pairs of query and key, contiguous 4,194,304" in said
    )
    assert "a rank sends up to 1,024.0 KiB, all 3,072.0 KiB, and as much again backward." in said
    assert re.search(r"queries and outputs +point to point", said)
    assert diptych(f"{command} --micro-batch-size 1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "contiguous: a rank computes scores of 4,194,304 pairs of query and key, zigzag 2,359,296." in said
    assert "queries and outputs" not in said


def test_plan_prints_every_term_for_a_size_no_machine_here_could_run(capsys):
    big = "--hidden-size 4096 --num-layers 32 --num-attention-heads 32 --seq-length 4096 --use-flash-attn"
    assert diptych(f"plan {big} --recompute-granularity selective --recompute-modules mhc layernorm") == 0
    out = capsys.readouterr().out
    assert "blocks: 6 of 5 layers: layernorm, mhc; 1 of 2 layers: layernorm, mhc" in out
    for term in ("residual_streams", "fc1", "silu of the gate", "saved", "peak of the step"):
        assert term in out
    assert diptych("plan --micro-batch-size 0") == 2
    assert "--micro-batch-size: expected at least 1, got 0" in capsys.readouterr().err


def test_a_pipeline_whose_first_rank_has_no_layers_is_planned_with_offload(capsys):
    shape = "plan --num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    assert diptych(shape, "E|ttttL", "--enable-tensor-offload") == 0
    late, divided = capsys.readouterr().out, "offloaded parameters of 4 layers, a step of 8 x 1,024 tokens on rank 1"
    assert divided in late
    assert diptych(shape, "Ett|ttL", "--enable-tensor-offload") == 0
    assert "offloaded parameters of 2 layers, a step of 8 x 1,024 tokens on rank 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "plan --num-layrs 3",
            "expected a flag of diptych plan, got an unknown one; did you mean --num-layers?",
        ),
        (
            "plan --lr 1",
            "got an unknown one; it is a flag of diptych compare and train",
        ),
        (
            "plann",
            "sample, info, import, export, curves, locate, got 'plann'; did you mean plan?",
        ),
        ("plan --num-layers", "--num-layers: expected a value, got none"),
        ("plan --num-layers x", "--num-layers: expected an integer, got 'x'"),
        ("plan --link-bandwidth x", "--link-bandwidth: expected a number, got 'x'"),
        ("plan --schedule 2f2b", "--schedule: expected one of 1f1b, None, dualpipe-v,"),
        ("plan more", "expected only flags and their values, got more"),
        ("info", "info: expected a checkpoint, or a run's folder, got none"),
        ("plan --html page", "--html: expected a name that ends in .html, got 'page'"),
        ("plan --link-bandwidth 1e308", "--link-bandwidth: expected a number from 1e-06 to 1e+09, got 1e+308"),
        (
            "plan --pipeline-model-parallel-size 2 --schedule interleaved",
            "got 'interleaved'; give --virtual-pipeline-model-parallel-size 2 or more",
        ),
        (
            "plan --num-layers 4 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 "
            "--schedule 1f1b",
            "with virtual stages, got '1f1b'; choose one of them",
        ),
        (
            "plan --num-layers 4 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 "
            "--num-microbatches 3",
            "change --num-microbatches or --microbatch-group-size-per-vp-stage",
        ),
        (
            "plan --fp8 hybrid --context-parallel-size 2 --cp-exchange pipelined",
            "--fp8-recipe: expected 'delayed' or 'blockwise' with --cp-exchange='pipelined'",
        ),
    ],
)
def test_a_refusal_exits_with_2_and_names_flags(command, message, capsys):
    assert diptych(command) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_reports_and_pages_name_flags_too(tmp_path, capsys):
    """Reasons why other schedules do not fit, and counts of configurations that the search refuses."""
    shape = "--num-layers 8 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"
    command = f"plan {shape} --num-microbatches 3 --schedule interleaved-zb1p"
    reason = "change --num-microbatches or --microbatch-group-size-per-vp-stage"
    assert diptych(f"{command} --html", tmp_path / "plan.html") == 0
    assert reason in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "plan.html").read_text()
    plan = json.loads(re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)[1])
    assert [reason in other["reason"] for other in plan["refused"]] == [True]
    assert diptych(f"{command} --generate-effort 0 --generate-schedule", tmp_path / "schedule.csv") == 0
    assert reason in " ".join(capsys.readouterr().out.split())
    assert diptych("plan --memory-limit 80GiB --ranks 4") == 0
    assert "refused, by setting: --num-layers " in " ".join(capsys.readouterr().out.split())


def test_help_lists_the_flags_of_every_command(capsys):
    with pytest.raises(SystemExit):
        diptych("--help")
    said = capsys.readouterr().out
    for flag in ("--num-layers", "--train-iters", "--generate-schedule", "--temperature", "--output-dir"):
        assert flag in said


def test_offload_is_planned_for_the_tokens_of_one_context_rank(capsys):
    assert diptych("plan --context-parallel-size 4 --enable-tensor-offload") == 0
    said = capsys.readouterr().out
    assert "a step of 1 x 256 tokens on rank 0" in said
    assert "tokens per microbatch; with 256 it" in " ".join(said.split())


def test_printed_times_are_those_of_the_page_and_both_state_the_cost_model(tmp_path, capsys):
    shape = "plan --num-layers 8 --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2"
    rates = "--compute-rate 1 --network-bandwidth 2 --memory-bandwidth 100"
    assert diptych(f"{shape} --schedule zb-v --num-microbatches 8 {rates} --html", tmp_path / "plan.html") == 0
    out, page = capsys.readouterr().out, (tmp_path / "plan.html").read_text()
    plan = json.loads(re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)[1])
    rows = [line.split() for line in out[out.index("schedules; times in ms") :].splitlines()]
    printed = {row[0].rstrip(","): row for row in rows if len(row) > 5}
    assert len(plan["schedules"]) == len([name for name in printed if name in {s["name"] for s in plan["schedules"]}])
    for schedule in plan["schedules"]:
        row = [cell for cell in printed[schedule["name"]] if not cell.startswith("v=")]
        assert float(row[1]) == pytest.approx(1e3 * schedule["makespan"], rel=1e-4)
        assert row[4] == f"{schedule['idle']:.1%}"
    said = " ".join(out.split())
    assert "milliseconds of a roofline with 1 TFLOP/s, 100 GB/s of memory and 2 GB/s between ranks" in said
    assert "diptych plan prints the same times" in page
    assert "have not been set beside measured" not in page


def test_plan_warns_of_blocks_that_cost_more_than_they_save(capsys):
    command = "plan --num-layers 12 --recompute-granularity selective --recompute-modules mhc --mhc-recompute-layer-num"
    assert diptych(f"{command} 12") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "warning: this recompute raises the peak of memory 1.2" in printed
    assert "use --mhc-recompute-layer-num 3" in printed
    assert diptych(f"{command} 3") == 0
    assert "warning" not in capsys.readouterr().out


def test_plan_counts_temporary_buffers_and_messages(capsys):
    """Parameters and moments, and the peak of forwards and backwards."""
    config = TransformerConfig(64, 4, 4, seq_length=64, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1")
    sizes = "--hidden-size 64 --num-layers 4 --num-attention-heads 4 --seq-length 64 --no-enable-hyper-connections"
    assert diptych(f"plan {sizes} --pipeline-model-parallel-size 2 --schedule zb-h1 --micro-batch-size 2") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    schedule = schedule_for(config, 8)
    ranks = rank_memories(config, schedule, predict_stages(config, 2))
    needed = [r.parameters + r.moments + peak for r, peak in zip(ranks, rank_peaks(config, schedule, 2), strict=True)]
    assert max(needed) > max(rank.total for rank in ranks)
    most = f"at most {max(needed) / 2**20:,.1f} MiB, on pipeline rank {needed.index(max(needed))}."
    assert f"With temporary buffers and messages: {most}" in said


def test_plan_finds_a_recompute_within_a_budget(capsys):
    """And train takes it as it takes the layout that is printed."""
    model = "--num-layers 4 --seq-length 128 --micro-batch-size 2"
    assert diptych(f"plan {model} --activation-memory-budget 12MiB") == 0
    said = capsys.readouterr().out
    layout = re.search(r"--recompute-layout (\S+)", said)
    peak = re.search(r"peak of the step +([\d.]+) +([\d.]+)", said)
    assert layout is not None
    assert peak is not None
    assert 10 < float(peak[2]) <= 12 < float(peak[1])
    assert diptych(f"plan {model} --recompute-layout {layout[1]}") == 0
    said, again = (re.sub(r"\s+", " ", text) for text in (said, capsys.readouterr().out))
    fitted = re.search(
        r"recompute within 12.0 MiB for a rank: ([\d.]+) MiB, ([\d.]+) ms .* at least ([\d.]+) ms\) ", said
    )
    assert fitted is not None
    assert float(peak[2]) <= float(fitted[1]) <= 12
    assert 0 < float(fitted[3]) <= float(fitted[2])
    assert said.replace(fitted[0], "") == again
    assert diptych(f"plan {model} --activation-memory-budget 2MiB") == 2
    assert re.search(r"--activation-memory-budget: expected at least [\d,]+ bytes", capsys.readouterr().err)
    assert diptych(f"plan {model} --activation-memory-budget much") == 2
    assert "--activation-memory-budget: expected a size such as 80GiB" in capsys.readouterr().err
