"""docs/interop.md does what it says: its Python runs, its configuration is accepted."""

import re
from pathlib import Path

import jax
import yaml

from tests.data_helpers import small_tokenizer
from tests.helpers import random_values, tiny_config
from zaya_jax.config import load_config
from zaya_jax.hf.exporter import read_arrays, write_folder

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_python_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    config = tiny_config()
    exported = tmp_path / "runs" / "exported"
    write_folder(exported, config, read_arrays(jax.device_get(random_values(config))), "bfloat16")
    small_tokenizer().save(exported / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("".join(blocks("python")), names)  # noqa: S102 (our own document; tests/soak/test_docs.py pastes it twice)
    assert capsys.readouterr().out.split() == ["2", "False", "67"]
    assert (Path(names["released"]) / "tokenizer.json").read_bytes() == (exported / "tokenizer.json").read_bytes()


def test_the_configuration_is_accepted():
    (text,) = blocks("yaml")
    ((key, value),) = yaml.safe_load(text).items()
    config = load_config(ROOT / "configs" / "zaya1_8b.yaml", [f"{key}={value}"])
    config.check()
