"""Checkpoints with a right checksum and impossible contents: each is named before it is used."""

import hashlib
import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from diptych.plans import checkpoint as checkpoints
from diptych.plans.checkpoint import RECORD, CheckpointError, read_checkpoint
from tests.command import diptych
from tests.saving.support import new_trainer

WEIGHT = "model.decoder.final_layernorm.weight"
SECOND = "second_moment.decoder.final_layernorm.weight"


def forge(path, change) -> None:
    """Write a checkpoint anew with its arrays and record changed, and the checksum that goes with them."""
    with safe_open(path, "np") as file:
        record = json.loads(file.metadata()[RECORD])
    arrays = load_file(path)
    record.pop("checksum")
    changed = change(arrays, record)
    record = record if changed is None else changed
    text = record if isinstance(record, str) else signed(arrays, record)
    path.write_bytes(save(arrays, {RECORD: text}))


def signed(arrays, record) -> str:
    """A record's JSON with the checksum that a writer of ours would give it."""
    if isinstance(record, dict) and "checksum" not in record:
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
        for name in sorted(arrays):
            digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
            digest.update(np.ascontiguousarray(arrays[name]).tobytes())
        record = {**record, "checksum": digest.hexdigest()}
    return json.dumps(record)


def of_record(**entries):
    return lambda arrays, record: record.update(entries)


def of_settings(part, **entries):
    return lambda arrays, record: record["settings"][part].update(entries)


def without(*path):
    def change(arrays, record):
        for name in path[:-1]:
            record = record[name]
        del record[path[-1]]

    return change


def of_array(name, value):
    return lambda arrays, record: arrays.update({name: value(arrays.get(name))})


def set_first(value):
    def change(array):
        array = array.copy()
        array.flat[0] = value
        return array

    return change


FORGED = {
    "format 0": (of_record(format=0), "got format 0, where one of 1, 2 was expected"),
    "format -1": (of_record(format=-1), "got format -1"),
    "a run as weights alone": (of_record(format=2), "got settings with a surplus 'data'"),
    "format true": (of_record(format=True), "got format True"),
    "format null": (of_record(format=None), "got format None"),
    "format 1.0": (of_record(format=1.0), "got format 1.0"),
    "format NaN": (of_record(format=float("nan")), "got format nan, where one of 1, 2 was expected"),
    "no format": (without("format"), "got record without 'format'"),
    "step true": (of_record(step=True), "got step True, where one from 0 to train_iters=20"),
    "step beyond the end": (of_record(step=21), "got step 21, where one from 0 to train_iters=20"),
    "step -1": (of_record(step=-1), "got step -1"),
    "step of another name": (of_record(step=4), "got step 4, where its name says 3"),
    "step 3.0": (of_record(step=3.0), "got step 3.0"),
    "no step": (without("step"), "got record without 'step'"),
    "a surplus entry": (of_record(more=1), "got record with a surplus 'more'"),
    "checksum null": (of_record(checksum=None), "got checksum None, where 64 hexadecimal digits"),
    "settings a list": (of_record(settings=[]), r"got settings that is no JSON object but \[\]"),
    "no settings of data": (without("settings", "data"), "got settings without 'data'"),
    "model a list": (lambda a, r: r["settings"].update(model=[]), r"got settings of model that are no JSON object"),
    "record a list": (lambda a, r: "[1]", r"got a record that is no JSON object but \[1\]"),
    "record deep": (lambda a, r: '{"format": ' + "[" * 100_000, "got a record that is no JSON .values nested too deep"),
    "record long": (lambda a, r: " " * 1_000_001, "got a record of 1,000,001 characters"),
    "record with a key twice": (lambda a, r: '{"step": 1, "step": 2}', "got a record that is no JSON .'step' twice"),
    "num_layers huge": (of_settings("model", num_layers=10**7), "got num_layers 10000000, with .* arrays in all"),
    "num_layers text": (of_settings("model", num_layers="2"), "got num_layers '2', with"),
    "num_layers 1": (of_settings("model", num_layers=1), "got settings of model that none can have .layer_pat"),
    "num_layers 3": (of_settings("model", num_layers=3), "got no array 'first_moment.decoder.layers.2"),
    "hidden_size huge": (
        of_settings("model", hidden_size=10**15),
        "got F64 .* where F64 .*1000000000000000.* was expected",
    ),
    "hidden_size null": (of_settings("model", hidden_size=None), "got settings of model that none can have"),
    "no hidden_size": (
        without("settings", "model", "hidden_size"),
        "got settings of model that none can have .*hidden_",
    ),
    "unknown setting": (of_settings("model", hiden_size=8), "got settings of model that none can have .*hiden_size"),
    "a setting nested": (
        of_settings("model", layer_pattern=[[1]]),
        r"got layer_pattern \[\[1\]\], where text, a number",
    ),
    "dtype int32": (
        of_settings("model", params_dtype="int32"),
        "got settings of model that none can have .*params_dtype",
    ),
    "lr -1": (of_settings("train", lr=-1.0), "got settings of train that none can have .lr: expected a number"),
    "digest": (of_settings("data", corpus_digest="x"), "got corpus_digest 'x', which no corpus has"),
    "seed": (of_settings("data", data_seed=2**32), "got data_seed 4294967296, which no corpus has"),
    "no bytes to train on": (of_settings("data", training_bytes=0), "got training_bytes 0, which no corpus has"),
    "documents false": (of_settings("data", reset_attention_mask=False), "got reset_attention_mask False"),
    "int32 weights": (of_array(WEIGHT, lambda x: x.astype(np.int32)), rf"got I32 \[16\] in {WEIGHT}, where F64 \[16\]"),
    "bool weights": (of_array(WEIGHT, lambda x: x > 0), "got BOOL"),
    "float16 weights": (of_array(WEIGHT, lambda x: x.astype(np.float16)), "got F16"),
    "float32 weights": (of_array(WEIGHT, lambda x: x.astype(np.float32)), "got F32"),
    "a shorter array": (of_array(WEIGHT, lambda x: x[:-1]), rf"got F64 \[15\] in {WEIGHT}"),
    "a surplus array": (of_array("model.more", lambda x: np.zeros(2)), "got a surplus array 'model.more'"),
    "a missing array": (lambda a, r: without(SECOND)(r, a), f"got no array '{SECOND}'"),
    "NaN weights": (of_array(WEIGHT, set_first(np.nan)), f"got nan in {WEIGHT}, where finite numbers"),
    "infinite weights": (of_array(WEIGHT, set_first(-np.inf)), "got -inf in"),
    "NaN second moment": (of_array(SECOND, set_first(np.nan)), f"got nan in {SECOND}"),
    "negative second moment": (of_array(SECOND, set_first(-1.0)), f"got -1.0 in {SECOND}, where numbers of at least 0"),
}


@pytest.mark.parametrize("name", FORGED)
def test_impossible_contents_are_named(name, saved):
    change, expected = FORGED[name]
    forge(saved, change)
    with pytest.raises(CheckpointError, match=rf"expected a whole checkpoint in .*, {expected}") as error:
        read_checkpoint(saved)
    assert "remove it to continue from the previous checkpoint" in str(error.value)
    assert len(str(error.value)) < 1000
    with pytest.raises(CheckpointError):
        new_trainer("torch").resume(saved)


def test_a_record_of_earlier_versions_is_read(saved):
    """They recorded how the model was computed as well, and not where training ends."""

    def change(arrays, record):
        record["settings"]["model"].update(pipeline_model_parallel_size=2, recompute_modules=["mlp"], impl="auto")
        del record["settings"]["data"]["training_bytes"]

    forge(saved, change)
    assert read_checkpoint(saved).step == 3
    assert new_trainer("torch").resume(saved) == 3
    assert checkpoints.recorded_model(read_checkpoint(saved).settings).pipeline_model_parallel_size == 1
    assert diptych(f"sample {saved} --length 1 --prompt a") == 0


def test_no_array_is_read_before_the_record_is_right(saved, monkeypatch):
    forge(saved, of_settings("model", num_layers=10**7))
    read = []
    right = checkpoints.safe_open

    class Watched:
        def __init__(self, *arguments):
            self._file = right(*arguments)

        def __enter__(self):
            self._inside = self._file.__enter__()
            return self

        def __exit__(self, *exception):
            return self._file.__exit__(*exception)

        def __getattr__(self, name):
            if name == "get_tensor":
                read.append(name)
            return getattr(self._inside, name)

    monkeypatch.setattr(checkpoints, "safe_open", Watched)
    with pytest.raises(CheckpointError, match="num_layers"):
        read_checkpoint(saved)
    assert not read


def test_the_command_line_tells_a_forged_checkpoint_in_one_line(saved, capsys):
    forge(saved, of_settings("model", num_layers=10**7))
    for command in ("info", "sample"):
        assert diptych(f"{command} {saved}") == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert "num_layers 10000000" in error
