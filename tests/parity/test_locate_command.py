"""The command ``diptych locate`` passes every setting of ``locate``."""

import dataclasses
import inspect

import pytest

from parity import locate
from parity.cli import locate as command
from parity.cli.commands import Locate

SIDES = "examples/locate_a_bug.py:torch_side", "examples/locate_a_bug.py:jax_side"


class Stopped(BaseException):
    """Raised instead of comparing."""


def test_every_setting_arrives(tmp_path, monkeypatch):
    names, modules = tmp_path / "names.toml", tmp_path / "modules.toml"
    names.write_text('"up.weight" = { to = "up.kernel", transpose = true }')
    modules.write_text('"blocks.*" = "layers.*"')
    seen = {}

    def stop(*_, **settings):
        seen.update(settings)
        raise Stopped

    monkeypatch.setattr(command, "locate", stop)
    flags = {"ignore": ("*.buffer",), "seed": 3, "precision": "float32", "memory_limit": 7}
    with pytest.raises(Stopped):
        command.run_locate(Locate(*SIDES, names=names, modules=modules, **flags))
    assert seen == flags | {
        "names": {"up.weight": {"to": "up.kernel", "transpose": True}},
        "modules": {"blocks.*": "layers.*"},
    }


def test_every_setting_has_a_flag():
    settings = {name for name, p in inspect.signature(locate).parameters.items() if p.kind is p.KEYWORD_ONLY}
    flags = {field.name for field in dataclasses.fields(Locate)}
    assert settings - flags == {"static"}, "static values are Python objects; the functions of the files hold them"
