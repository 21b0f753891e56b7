"""A key that is accepted at the start can be sent, wherever the server was told of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stridelm.cli.main import build_parser
from stridelm.cli.serve import read_configs
from stridelm.server.callers import Keys
from stridelm.server.config import ServerConfig

NAMES = ("api_key", "operator_key")
BAD = ["", " ", "secret key", " secret", "secret ", "secret\n", "secret\t", "\x00secret", "secret\x7f"]
BAD += ["sécret", "secretключ", "secret\u200b", "secret\u00a0", "secret密", "secret🔑"]


def configured(form: str, name: str, key: str, directory: Path) -> ServerConfig:
    """The configuration of a server that is told of this key, and of a good one before it."""
    option, environment, words = name.replace("_", "-"), {}, []
    if form == "option":
        words = [f"--{option}=good", f"--{option}={key}"]
    elif form == "environment":
        environment = {f"STRIDE_{name.upper()}": f"good,{key}"}
    else:
        file = directory / "serve.yaml"
        file.write_text(f"{option}: {json.dumps(['good', key])}\n", "utf-8")
        words = ["--config", str(file)]
    args = build_parser("serve").parse_args(["serve", *words])
    return read_configs(args, environment)[0]


@pytest.mark.parametrize("form", ["option", "environment", "file"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", BAD, ids=ascii)
def test_keys_that_cannot_be_sent(tmp_path: Path, form: str, name: str, key: str) -> None:
    """Refused by the option's name, without a word of the key."""
    with pytest.raises(ValueError, match=name) as refusal:
        configured(form, name, key, tmp_path)
    assert "cret" not in str(refusal.value)


@pytest.mark.parametrize("form", ["option", "environment", "file"])
@pytest.mark.parametrize("name", NAMES)
def test_keys_that_can(tmp_path: Path, form: str, name: str) -> None:
    """Any other is accepted, and found in the header that sends it."""
    key = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != ",")  # a comma separates keys in a variable
    config = configured(form, name, key, tmp_path)
    keys = Keys(config.api_key or (), config.operator_key or ())
    caller = keys.caller(f"Bearer {key}")
    assert caller is not None and caller.operator == (name == "operator_key")
