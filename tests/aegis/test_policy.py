"""The file of defaults is the defaults, and one that extends it changes only what it says."""

import dataclasses

from tests.train_helpers import ROOT
from zaya_jax.aegis.policy import Policy, load_policy

DEFAULT = ROOT / "configs" / "aegis" / "default.yaml"


def test_the_file_of_defaults_is_the_defaults():
    assert load_policy(DEFAULT) == load_policy(None) == Policy()


def test_the_file_names_every_key():
    def keys(section):
        for field in dataclasses.fields(section):
            yield field.name
            if dataclasses.is_dataclass(value := getattr(section, field.name)):
                yield from keys(value)

    text = DEFAULT.read_text()
    assert not [key for key in keys(Policy()) if f"{key}:" not in text]


def test_a_policy_extends_the_defaults(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(f"extends: {DEFAULT}\nrules: {{gpu: fewer_devices}}\nlog_only: [spike]\n")
    policy = load_policy(path)
    assert policy.rules == dataclasses.replace(Policy().rules, gpu="fewer_devices")
    assert policy.log_only == ("spike",)
