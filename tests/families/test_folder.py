"""Hugging Face folders: import and export keep every weight, and say by name what does not fit."""

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.plans.checkpoint import MODEL, CheckpointError, read_checkpoint, recorded_model, split_arrays
from diptych.plans.config import TransformerConfig
from diptych.plans.families import OLMO_HYBRID, QWEN3_NEXT, FamilyError, find_family, folder
from diptych.plans.families.family import config_of, settings_of
from diptych.plans.families.folder import CONFIG, export_folder, import_folder, model_of
from diptych.plans.families.kimi import LINEAR_KEYS
from diptych.plans.tensor_files import (
    TensorFile,
    TensorFileError,
    TensorInfo,
    from_bfloat16,
    to_bfloat16,
    write_tensors,
)
from tests.families import models

TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights that transformers reads from a folder, and the type in which it does."""
    return models.transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (f + d) % 3 == 0 else pytest.mark.slow)
        for f, family in enumerate(models.FAMILIES)
        for d, dtype in enumerate(TYPES)
    ],
)
def test_a_folder_comes_back_as_it_was(family, dtype, tmp_path, monkeypatch):
    """In shards of few kilobytes, with a tied head in float32; transformers reads equal weights."""
    model = models.build(family, tie_word_embeddings=dtype == "float32" and family != "kimi_linear")
    theirs = models.save(model, tmp_path / "theirs", TYPES[dtype], shard="20KB")
    assert len([*theirs.glob("*.safetensors")]) > 2
    (theirs / "tokenizer.json").write_text("{}")
    import_folder(theirs, tmp_path / "ours")
    monkeypatch.setattr(folder, "SHARD_BYTES", 20_000)
    written = export_folder(tmp_path / "ours", tmp_path / "again", dtype=dtype)
    assert len(written) > 2
    before, after = state_of(theirs), state_of(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    first, second = (json.loads((path / CONFIG).read_text()) for path in (theirs, tmp_path / "again"))
    assert second | {"dtype": dtype} == first | {"dtype": dtype, "transformers_version": second["transformers_version"]}
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_weights_in_bfloat16_become_float32_exactly(tmp_path):
    theirs = models.save(models.build("qwen3_next"), tmp_path / "theirs", torch.bfloat16)
    checkpoint = read_checkpoint(import_folder(theirs, tmp_path / "ours").checkpoint)
    assert not checkpoint.is_run
    assert recorded_model(checkpoint.settings).params_dtype == "float32"
    ours = split_arrays(checkpoint.arrays, MODEL)["embedding.weight"]
    np.testing.assert_array_equal(ours, state_of(theirs)["model.embed_tokens.weight"].float().numpy())


def test_rounding_to_bfloat16_is_that_of_pytorch():
    """All signs and exponents, ties to even, the largest numbers, and what is not finite."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000
    special = np.array([0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1], np.uint32)
    values = np.concatenate([bits, ties, special]).view(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    with np.errstate(invalid="ignore"):
        found = from_bfloat16(to_bfloat16(values))
    np.testing.assert_array_equal(found, expected.float().numpy())


def test_settings_of_earlier_versions_of_transformers(tmp_path):
    """Rotary settings at the top level, and an interval in place of layer types."""
    theirs = models.save(models.build("qwen3_next"), tmp_path)
    config = json.loads((theirs / CONFIG).read_text())
    expected = model_of(theirs)[1]
    config |= {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "rope_scaling": None, "full_attention_interval": 2}
    for key in ("rope_parameters", "layer_types"):
        del config[key]
    (theirs / CONFIG).write_text(json.dumps(config))
    assert model_of(theirs)[1] == expected


DEFAULT = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
ROTARY = {
    "base beside the others": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        "rope_theta": 50.0,
    },
    "share beside the others": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "partial_rotary_factor": 0.5,
    },
    "one of two": {"rope_parameters": DEFAULT, "rope_theta": 70.0, "partial_rotary_factor": 1.0},
    "old names": {"rope_theta": 50.0, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}},
    "null beside the others": {"rope_parameters": DEFAULT, "rope_scaling": None},
}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_settings_have_the_precedence_of_transformers(name, tmp_path):
    path = models.save(models.build("qwen3_next"), tmp_path)
    config = json.loads((path / CONFIG).read_text())
    del config["rope_parameters"]
    (path / CONFIG).write_text(json.dumps(config | ROTARY[name]))
    expected = models.transformers.AutoConfig.from_pretrained(path).rope_parameters
    model = model_of(path)[1]
    assert (model.rotary_base, model.rotary_percent) == (expected["rope_theta"], expected["partial_rotary_factor"])


def tiny(tmp_path: Path) -> Path:
    """A folder of float64 weights in one file."""
    return models.save(models.build("qwen3_next"), tmp_path / "theirs")


def with_setting(key: str, value):
    """A folder with another setting in config.json; None: without it."""

    def change(path: Path) -> None:
        config = json.loads((path / CONFIG).read_text())
        config = {k: v for k, v in config.items() if k != key} | ({} if value is None else {key: value})
        (path / CONFIG).write_text(json.dumps(config))

    return change


def with_tensors(change):
    """A folder with other tensors."""

    def apply(path: Path) -> None:
        file = TensorFile(path / "model.safetensors")
        found = change({name: file.read(name) for name in file.tensors})
        infos = {name: TensorInfo("F64", x.shape) for name, x in found.items()}
        write_tensors(path / "model.safetensors", infos, found.__getitem__)

    return apply


def with_header(change, more: bytes = b""):
    """A folder whose weights have another header, and perhaps more bytes."""

    def apply(path: Path) -> None:
        content = (path / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        text = json.dumps(change(json.loads(content[8:begin]))).encode()
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[begin:] + more)

    return apply


def with_entry(**fields):
    """A header with other fields of one tensor."""
    return with_header(lambda header: header | {"model.norm.weight": header["model.norm.weight"] | fields})


def with_index(weight_map):
    """A folder whose one file is replaced by an index."""

    def change(path: Path) -> None:
        (path / "model.safetensors").rename(path / "a.safetensors")
        (path / folder.INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def in_two_shards(path: Path) -> None:
    """A folder with a tensor in two shards."""
    shutil.copy(path / "model.safetensors", path / "b.safetensors")
    with_index({"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"})(path)


REFUSED = {
    "no folder": (shutil.rmtree, r"expected a Hugging Face folder with config\.json, got .*No such file"),
    "no object": (lambda path: (path / CONFIG).write_text("[]"), "expected a JSON object"),
    "another family": (with_setting("model_type", "gpt2"), "model_type: expected one of .*qwen3_next, .*got 'gpt2'"),
    "a vision tower": (
        lambda path: (path / CONFIG).write_text('{"model_type": "qwen3_5", "text_config": {}, "vision_config": {}}'),
        r"expected a language model alone, got 'qwen3_5' with vision_config; .*AutoModelForCausalLM",
    ),
    "experts by default": (with_setting("num_experts", None), "expected the .* tensors of .*, got no .*experts"),
    "experts without tensors": (with_setting("num_experts", 16), "expected the .* tensors of .*, got no .*experts"),
    "another activation": (with_setting("hidden_act", "gelu"), "hidden_act: expected 'silu', got 'gelu'"),
    "biases": (with_setting("attention_bias", True), "attention_bias: expected False, got True"),
    "scaled rotary embedding": (
        with_setting("rope_parameters", {"rope_type": "yarn", "rope_theta": 1.0}),
        r"rope_parameters\.rope_type: expected 'default', got 'yarn'",
    ),
    "biases that are a number": (with_setting("attention_bias", 0), "attention_bias: expected False, got 0"),
    "unknown setting": (with_setting("sliding_window", 4), "got 'sliding_window' = 4, whose meaning is unknown"),
    "unknown nested setting": (
        with_setting("rope_parameters", {"rope_type": "default", "rope_theta": 1.0, "factor": 2.0}),
        r"got 'rope_parameters\.factor' = 2\.0, whose meaning is unknown",
    ),
    "missing setting": (with_setting("hidden_size", None), "expected hidden_size, got none"),
    "another type of layer": (
        with_setting("layer_types", ["mamba"] * 3),
        "expected types out of linear_attention, full",
    ),
    "a number of layers that is text": (
        with_setting("num_hidden_layers", "3"),
        r"num_hidden_layers: expected an integer >= 1, got '3'",
    ),
    "a type of layer that is a list": (
        with_setting("layer_types", [["linear_attention"]] * 3),
        "layer_types: expected types out of linear_attention, full_attention, got ",
    ),
    "a step of experts that is 0": (
        with_setting("decoder_sparse_step", 0),
        "decoder_sparse_step: expected an integer >= 1, got 0",
    ),
    "dense layers that are text": (
        with_setting("mlp_only_layers", ["1"]),
        "mlp_only_layers: expected a list of numbers of 3 layers, got ",
    ),
    "a number of experts that is no integer": (
        with_setting("num_experts", False),
        "num_experts: expected an integer >= 0, got False",
    ),
    "a key of another family": (
        with_setting("mlp_layer_types", ["dense"] * 3),
        "expected settings of qwen3_next, got 'mlp_layer_types'",
    ),
    "a tie that is text": (
        with_setting("tie_word_embeddings", "false"),
        "tie_word_embeddings: expected true or false, got 'false'",
    ),
    "a rotary embedding that is text": (
        with_setting("rope_parameters", "default"),
        "rope_parameters: expected a mapping, got 'default'",
    ),
    "a rotary embedding that is false": (
        with_setting("rope_scaling", False),
        "rope_scaling: expected a mapping, got False",
    ),
    "another rotary embedding beside the usual one": (
        with_setting("rope_scaling", {"rope_type": "linear", "factor": 4.0}),
        r"rope_parameters\.",
    ),
    "too few types of layers": (with_setting("layer_types", []), r"expected a list of 3 types, got \[\]"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"expected model\.safetensors or .*got neither"),
    "missing tensor": (
        with_tensors(lambda x: {n: a for n, a in x.items() if "norm.weight" not in n}),
        "expected the .* tensors of qwen3_next, got no model.layers.0.input_layernorm.weight, .*",
    ),
    "unknown tensor": (
        with_tensors(lambda x: x | {"model.extra": np.zeros(3)}),
        "expected the .* tensors of qwen3_next, got also model.extra",
    ),
    "another shape": (
        with_tensors(lambda x: x | {"model.norm.weight": np.zeros(3)}),
        r"model\.norm\.weight: expected shape \[24\] in .*, got \[3\] in F64",
    ),
    "not finite": (
        with_tensors(lambda x: x | {"model.norm.weight": np.full(24, np.nan)}),
        "expected to write weights, got nan in model.decoder.final_layernorm.weight",
    ),
    "damaged weights": (
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 40),
        "expected a safetensors file, got one of 40 bytes without a header",
    ),
    "index that leaves the folder": (
        with_index({"model.norm.weight": "../a.safetensors"}),
        r"expected names of files in this folder, got '\.\./a\.safetensors'",
    ),
    "missing shard": (
        with_index({"model.norm.weight": "b.safetensors"}),
        r"b\.safetensors: expected a shard of the index, got .*No such file",
    ),
    "a shard that is a list": (with_index({"a": ["a.safetensors"]}), r"expected names of files .*, got \['a\.saf"),
    "a shard that is null": (with_index({"a": None}), "expected names of files in this folder, got None"),
    "a long name of a shard": (with_index({"a": "a" * 256}), "expected names of files in this folder, got 'aaaa"),
    "a zero byte in the name of a shard": (with_index({"a": "a\0"}), r"expected names of files .*, got 'a\\x00'"),
    "an index whose map is a list": (with_index(["a.safetensors"]), "expected an index with a weight_map, got "),
    "a tensor in two shards": (
        in_two_shards,
        "expected either lm_head.weight in a.safetensors or lm_head.weight in b.safetensors, got both",
    ),
    "a header that is a list": (with_header(lambda header: [header]), "expected a header with an object of tensors"),
    "metadata that are a list": (
        with_header(lambda header: header | {"__metadata__": ["pt"]}),
        r"expected an object of texts as __metadata__, got \['pt'\]",
    ),
    "tensors that overlap": (
        with_entry(data_offsets=[0, 192]),
        "expected it to begin at byte 192 of the data, where the one before it ends, got 0; the file is damaged",
    ),
    "bytes without a tensor": (
        with_header(dict, bytes(8)),
        r"expected .* bytes of tensors, got .*; the file is damaged",
    ),
    "a shape that is an object": (
        with_header(lambda header: header | {"a": {"dtype": "I8", "shape": {}, "data_offsets": [0, 0]}}),
        "tensor 'a': expected dtype, shape and data_offsets within the file, got {",
    ),
    "a convolution without rows": (
        with_tensors(lambda x: x | {"model.layers.0.linear_attn.conv1d.weight": np.zeros(())}),
        r"conv1d\.weight: expected shape \[56, 1, 4\] in .*, got \[\] in F64",
    ),
    "a name of two lines": (
        with_tensors(lambda x: x | {"model.a\nb": np.zeros(3)}),
        r"got also 'model\.a\\nb'$",
    ),
    "more layers than lists can name": (
        with_setting("num_hidden_layers", 10**9),
        "num_hidden_layers: expected at most 10,000 layers, got 1000000000",
    ),
    "more experts than tensors": (
        with_setting("num_experts", 10**9),
        r"expected the tensors of 3 layers, with 1,000,000,000 experts in each mixture, got \d+ tensors",
    ),
    "a size that is text": (
        with_setting("head_dim", "12"),
        "config.json, head_dim: expected an integer >= 1, got '12'",
    ),
    "a size above any memory": (
        with_setting("vocab_size", 10**400),
        "config.json, vocab_size: expected an integer < 2",
    ),
    "a number that is no float": (
        with_setting("rms_norm_eps", 10**400),
        r"config.json, rms_norm_eps: expected a number in \(0, inf\), got 1000",
    ),
    "a long key": (with_setting("x" * 10**6, 1), r"expected settings of qwen3_next, got 'x{199}\.\.\. = 1, whose"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name, tmp_path):
    path = tiny(tmp_path)
    change, message = REFUSED[name]
    change(path)
    with pytest.raises((FamilyError, CheckpointError, TensorFileError), match=message):
        import_folder(path, tmp_path / "ours")
    assert not [*tmp_path.glob("ours/*")]


def test_messages_have_one_line(tmp_path):
    path = tiny(tmp_path)
    with_setting("hidden_size", "x" * 10**6)(path)
    with pytest.raises(FamilyError, match="hidden_size: expected an integer") as caught:
        model_of(path)
    assert len(str(caught.value)) < 1000


def test_an_output_matrix_beside_a_tied_embedding_is_its_copy(tmp_path):
    """transformers ties them only if they are equal."""
    path = models.save(models.build("qwen3_next", tie_word_embeddings=True), tmp_path / "theirs")
    with_tensors(lambda x: x | {"lm_head.weight": x["model.embed_tokens.weight"]})(path)
    assert import_folder(path, tmp_path / "ours").skipped == ("lm_head.weight",)
    with_tensors(lambda x: x | {"lm_head.weight": 2 * x["model.embed_tokens.weight"]})(path)
    with pytest.raises(FamilyError, match=r"lm_head\.weight: expected a copy of model\.embed_tokens\.weight, by tie_"):
        import_folder(path, tmp_path / "again")


def test_one_file_comes_before_an_index_as_in_transformers(tmp_path):
    path = models.save(models.build("qwen3_next"), tmp_path / "theirs", shard="20KB")
    models.save(models.build("qwen3_next"), tmp_path / "one")
    shutil.copy(tmp_path / "one" / "model.safetensors", path)
    with_tensors(lambda x: x | {"model.norm.weight": np.full(24, 7.0)})(path)
    arrays = read_checkpoint(import_folder(path, tmp_path / "ours").checkpoint).arrays
    np.testing.assert_array_equal(state_of(path)["model.norm.weight"].numpy(), 7.0)
    np.testing.assert_array_equal(arrays[f"{MODEL}decoder.final_layernorm.weight"], 7.0)


def test_a_file_in_place_of_the_source_leaves_no_checkpoint(tmp_path):
    path = tiny(tmp_path)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / folder.SOURCE).touch()
    with pytest.raises(FamilyError, match="expected a folder without source, got one with it"):
        import_folder(path, tmp_path / "ours")
    assert [each.name for each in tmp_path.glob("ours/*")] == [folder.SOURCE]


@pytest.mark.parametrize("name", ["model.safetensors", folder.INDEX, "model-00001-of-00002.safetensors"])
def test_an_export_does_not_replace_weights(name, tmp_path):
    import_folder(tiny(tmp_path), tmp_path / "ours")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(FamilyError, match=f"expected a new folder, got one with {name}; give another, or remove it"):
        export_folder(tmp_path / "ours", tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_an_export_into_a_file_is_refused(tmp_path):
    import_folder(tiny(tmp_path), tmp_path / "ours")
    (tmp_path / "out").touch()
    for path in (tmp_path / "out", tmp_path / "out" / "inside"):
        with pytest.raises(
            FamilyError, match=r"out.*: expected a folder to write to, got (File exists|Not a directory)"
        ):
            export_folder(tmp_path / "ours", path)


def test_llama_needs_a_width_that_its_heads_divide(tmp_path):
    """transformers also refuses it if head_dim is there."""
    path = models.save(models.build("llama"), tmp_path / "theirs")
    with_setting("num_attention_heads", 5)(path)
    with pytest.raises(FamilyError, match="hidden_size: expected a multiple of num_attention_heads=5, got 24"):
        model_of(path)


def test_a_folder_in_use_is_refused(tmp_path):
    path = tiny(tmp_path)
    import_folder(path, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="expected a folder without checkpoints for a new run"):
        import_folder(path, tmp_path / "ours")
    with pytest.raises(FamilyError, match=r"expected a new folder, got one with config\.json"):
        export_folder(tmp_path / "ours", path)


def test_tensors_that_transformers_ignores_are_left_out_and_named(tmp_path):
    path = tiny(tmp_path)
    with_tensors(lambda x: x | {"mtp.norm.weight": np.zeros(3)})(path)
    assert import_folder(path, tmp_path / "ours").skipped == ("mtp.norm.weight",)


def test_import_takes_the_memory_of_two_tensors(tmp_path):
    model = models.build("qwen3_next", hidden_size=512, vocab_size=2048, intermediate_size=1024)
    path = models.save(model, tmp_path / "theirs", torch.bfloat16, shard="1MB")
    largest = 4 * 2048 * 512
    total = sum(4 * parameter.numel() for parameter in model.parameters())
    tracemalloc.start()
    try:
        import_folder(path, tmp_path / "ours")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 4 * largest
    assert peak < 2.7 * largest  # the bits of a tensor, its values, and the parameter made of them


def test_a_layer_that_the_family_lacks_is_not_exported():
    model = TransformerConfig(**settings_of(QWEN3_NEXT, models.build("qwen3_next").config.to_dict()))
    for change in ("gdn+gelu,attention,gdn", "gdn,attention+ffn=8,gdn", "kda,attention,gdn"):
        with pytest.raises(FamilyError, match="layer_pattern: expected"):
            config_of(QWEN3_NEXT, replace(model, layer_pattern=change))


def test_olmo_hybrid_says_whether_it_has_positions(tmp_path):
    path = models.save(models.build("olmo_hybrid"), tmp_path / "theirs")
    assert model_of(path)[1].rotary_percent == 0.0
    with_setting("rope_parameters", {"rope_type": "default", "rope_theta": 100.0})(path)
    model = model_of(path)[1]
    assert (model.rotary_percent, model.rotary_base) == (1.0, 100.0)
    with pytest.raises(FamilyError, match=r"rotary_percent: expected 0\.0 or 1\.0 in olmo_hybrid, got 0\.3"):
        config_of(OLMO_HYBRID, replace(model, rotary_percent=1 / 3))
    with_setting("rope_parameters", None)(path)
    with pytest.raises(FamilyError, match="rope_parameters: expected a rope_theta, null for a model without"):
        model_of(path)


def test_olmo_hybrid_has_names_of_files_and_names_of_modules(tmp_path):
    """The convolution is cut into q, k and v in published files, and into thirds by transformers 5.23."""
    path = models.save(models.build("olmo_hybrid"), tmp_path / "theirs")
    first = read_checkpoint(import_folder(path, tmp_path / "first").checkpoint).arrays
    export_folder(tmp_path / "first", tmp_path / "cut")
    file = TensorFile(tmp_path / "cut" / "model.safetensors")
    rows = [file.tensors[f"model.layers.0.linear_attn.{part}_conv1d.weight"].shape[0] for part in "qkv"]
    assert rows == [16, 16, 24]
    others = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}

    def renamed(tensors):
        return {".".join(others.get(part, part) for part in name.split(".")): x for name, x in tensors.items()}

    with_tensors(renamed)(tmp_path / "cut")
    second = read_checkpoint(import_folder(tmp_path / "cut", tmp_path / "second").checkpoint).arrays
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)
    norm = "model.layers.0.attention_layer_norm.weight"
    with_tensors(lambda tensors: tensors | {norm: np.zeros(24)})(tmp_path / "cut")
    with pytest.raises(FamilyError, match=r"expected either model\.layers\.0.*norm\.weight in .* or .*, got both"):
        import_folder(tmp_path / "cut", tmp_path / "third")


def test_kimi_linear_as_it_was_published(tmp_path):
    """Settings of the delta attention in a mapping, layers counted from 1, and the number of dense layers."""
    path = models.save(models.build("kimi_linear"), tmp_path)
    config = json.loads((path / CONFIG).read_text())
    expected = model_of(path)[1]
    linear = {key: config.pop(usual) for key, usual in LINEAR_KEYS.items()}
    layers = {"kda_layers": [1, 3], "full_attn_layers": [2]}
    published = {
        "linear_attn_config": linear | layers,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "use_grouped_topk": True,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    config = {key: value for key, value in config.items() if key not in ("layer_types", "mlp_layer_types")}
    (path / CONFIG).write_text(json.dumps(config | published))
    assert model_of(path)[1] == expected
    with_setting("num_key_value_heads", 2)(path)
    with pytest.raises(FamilyError, match="num_key_value_heads: expected num_attention_heads=4, got 2"):
        model_of(path)
    with_setting("num_key_value_heads", None)(path)
    with pytest.raises(FamilyError, match="num_key_value_heads: expected num_attention_heads=4, got 32; a missing one"):
        model_of(path)
    with_setting("num_key_value_heads", 4)(path)
    with_setting("max_position_embeddings", 7)(path)
    with pytest.raises(
        FamilyError, match="expected either max_position_embeddings or model_max_length, got both, 7 and "
    ):
        model_of(path)
    with_setting("max_position_embeddings", None)(path)
    with_setting("linear_attn_config", 7)(path)
    with pytest.raises(FamilyError, match="linear_attn_config: expected a mapping, got 7"):
        model_of(path)
    with_setting("linear_attn_config", linear | layers)(path)
    with_setting("mla_use_nope", False)(path)
    with pytest.raises(FamilyError, match="mla_use_nope: expected True, got False"):
        model_of(path)


@pytest.mark.parametrize("layers", [{"full_attn_layers": [2]}, {"kda_layers": [1], "full_attn_layers": [2]}, {}])
def test_kimi_linear_needs_the_type_of_every_layer(layers, tmp_path):
    """transformers takes its default for incomplete lists."""
    path = models.save(models.build("kimi_linear"), tmp_path)
    config = json.loads((path / CONFIG).read_text())
    linear = {key: config.pop(usual) for key, usual in LINEAR_KEYS.items()}
    del config["layer_types"]
    (path / CONFIG).write_text(json.dumps(config | {"linear_attn_config": linear | layers}))
    with pytest.raises(FamilyError, match="each number from 1 to 3 once"):
        model_of(path)


@pytest.mark.parametrize(
    ("family", "key"),
    [("kimi_linear", "num_shared_experts"), ("qwen3_next with experts", "shared_expert_intermediate_size")],
)
def test_experts_without_a_shared_one_are_refused_by_name(family, key, tmp_path):
    path = models.save(models.build(family), tmp_path)
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**config, key: 0}))
    with pytest.raises(FamilyError, match=f"{key}: expected at least 1, got 0: experts without a shared one"):
        model_of(path)


def test_scaled_rotary_embeddings_are_refused_by_their_type(tmp_path):
    path = models.save(models.build("llama"), tmp_path)
    config = json.loads((path / CONFIG).read_text())
    config["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(FamilyError, match=r"rope_type: expected 'default', got 'llama3': it is not implemented"):
        model_of(path)


@pytest.mark.parametrize(
    ("family", "settings", "missing"),
    [
        ("kimi_linear", {"mlp_layer_types": ["dense"] * 3}, "moe_intermediate_size"),
        ("qwen3_next", {"mlp_only_layers": [0, 1, 2]}, "num_experts"),
    ],
)
def test_dense_models_without_settings_of_experts_are_exported(family, settings, missing, tmp_path):
    model = models.build.__wrapped__(family, **settings)
    path = models.save(model, tmp_path / "theirs")
    config = {key: value for key, value in json.loads((path / CONFIG).read_text()).items() if key != missing}
    (path / CONFIG).write_text(json.dumps(config))
    import_folder(path, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "out")
    loaded, info = models.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_find_family_takes_every_name():
    for name in models.FAMILIES:
        assert find_family({"model_type": name.split()[0]}) is models.family_of(name)
