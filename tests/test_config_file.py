"""Settings from a TOML file: each once, and every wrong file is named in one line."""

import pytest

from parity.cli.config_file import with_config_file


def flags_of(folder, text: str | bytes) -> list[str]:
    path = folder / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return with_config_file(["train", "--config", str(path), "--seed", "1"])


def test_tables_only_group(tmp_path):
    text = 'lr = 1e-3\n[model]\nhidden_size = 64\nbf16 = false\n[model.deep]\nrecompute-modules = ["mlp", "mhc"]\n'
    expected = ["train", "--lr", "0.001", "--hidden-size", "64", "--no-bf16", "--recompute-modules", "mlp", "mhc"]
    assert flags_of(tmp_path, text) == [*expected, "--seed", "1"]


def test_a_key_with_a_dot_is_no_table(tmp_path):
    assert flags_of(tmp_path, '"model.lr" = 0.5\n') == ["train", "--model.lr", "0.5", "--seed", "1"]


def test_a_file_without_end():
    with pytest.raises(ValueError, match=r"config: expected a TOML file in /dev/zero, got more than .* bytes"):
        with_config_file(["train", "--config", "/dev/zero"])


def test_a_byte_order_mark_says_nothing(tmp_path):
    assert flags_of(tmp_path, b"\xef\xbb\xbflr = 0.5\n") == ["train", "--lr", "0.5", "--seed", "1"]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("[model]\nlr = 0.1\n[train]\nlr = 0.2\n", "model.lr and train.lr"),
        ("hidden_size = 8\nhidden-size = 16\n", "hidden_size and hidden-size"),
        ("bf16 = true\n[model]\nno-bf16 = true\n", "bf16 and model.no-bf16"),
        ("lr = 0.1\n[a.b]\nlr = 0.1\n", r"lr and a\.b\.lr"),
    ],
)
def test_a_setting_twice(tmp_path, text, places):
    with pytest.raises(ValueError, match=rf"config: expected each setting once in .*, got {places}; keep one of them"):
        flags_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = " + "[" * 100_000, "expected a TOML file in .*, got one nested too deep to be read"),
        ("a = " + "1" * 5000, "expected a TOML file in .*, got "),
        ("a = 0x" + "f" * 5000, "expected a number of at most 4300 digits for a in .*, got a longer one"),
        ("a = 1979-05-27", r"expected text, a number, .* for a in .*, got datetime\.date"),
        ("[model]\na = [[1]]", r"expected text, a number, .* for model\.a in .*, got \[\[1\]\]"),
        (b"\xff\xfe", "expected a TOML file in .*, got 'utf-8' codec"),
        ("a = \0", "expected a TOML file in .*, got "),
        ("a = 1\na = 2", "expected a TOML file in .*, got Cannot overwrite a value"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path, text, expected):
    with pytest.raises(ValueError, match=rf"\Aconfig: {expected}") as error:
        flags_of(tmp_path, text)
    assert len(str(error.value)) < 600
    assert "\n" not in str(error.value)
