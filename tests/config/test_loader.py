"""YAML in and out, and what is said of each mistake."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.config_helpers import SMALL, refused_to_load, written
from tests.helpers import TINY
from tests.hostile_names import HOSTILE_NAMES
from zaya_jax.config import Config, current_key, flatten_keys, load_config, to_dict, to_yaml, with_current_keys
from zaya_jax.config.loader import RENAMED

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_resolves_to_its_golden_file(path):
    config = load_config(path)
    write = f"python -m zaya_jax.main --config configs/{path.name} --print-config > tests/config/golden/{path.name}"
    assert to_yaml(config) == (GOLDEN / path.name).read_text(encoding="utf-8"), f"If this is meant: {write}"
    assert load_config(GOLDEN / path.name) == config


def test_every_golden_file_is_of_a_shipped_configuration():
    assert {p.name for p in GOLDEN.glob("*.yaml")} == {p.name for p in (ROOT / "configs").glob("*.yaml")}


def test_loading_leaves_jax_unimported():
    code = (
        "import sys; from zaya_jax.config import load_config, to_yaml; to_yaml(load_config('configs/tiny.yaml')); "
        "sys.exit(bool({'jax', 'numpy', 'flax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(1e-30, 1e6),
    run_dir=st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=20),
    prompt=st.sampled_from(
        ["on", "null", "1e5", "3", "~", "a: b", "# c", " x ", "2024-01-01", "é☃", "a\nb\t", "'\"", "=", "0x1", "a\x85b",
         "\u2028", "\ufeffx"]
    ),
    pattern=st.sampled_from([("full",), ("full", "sliding"), ("sliding", "sliding")]),
    window=st.one_of(st.none(), st.integers(1, 9)),
    bias=st.booleans(),
    suffixes=st.lists(st.sampled_from([".py", "yes", ".1", "null"]), min_size=1, max_size=3),
)  # fmt: skip
def test_what_is_written_is_read_back_equal(
    tmp_path_factory, seed, rate, run_dir, prompt, pattern, window, bias, suffixes
):
    config = dataclasses.replace(
        SMALL,
        seed=seed,
        run_dir=run_dir,
        model=dataclasses.replace(
            TINY, layer_pattern=pattern, sliding_window=4 if "sliding" in pattern else window, attention_bias=bias
        ),
        data=dataclasses.replace(SMALL.data, suffixes=tuple(suffixes)),
        sample=dataclasses.replace(SMALL.sample, prompt=prompt),
        optimizer=dataclasses.replace(
            SMALL.optimizer, adamw=dataclasses.replace(SMALL.optimizer.adamw, learning_rate=rate)
        ),
    )
    path = written(tmp_path_factory.mktemp("round"), to_yaml(config))
    assert load_config(path) == config
    assert to_yaml(load_config(path)) == to_yaml(config)


@given(
    steps=st.integers(1, 10**9),
    rate=st.sampled_from(["1e-3", "1.0e-3", "0.001", "1E-3", "'0.001'"]),
    bias=st.sampled_from(["true", "false", "yes", "no", "on", "off"]),
)
def test_overrides_are_applied_last(base, steps, rate, bias):
    config = load_config(base, [f"train.log_every={steps}", f"optimizer.muon.learning_rate={rate}",
                                f"model.attention_bias={bias}", "train.log_every=7",
                                f"train.log_every={steps}"])  # fmt: skip
    assert config.train.log_every == steps
    assert config.optimizer.muon.learning_rate == 1e-3
    assert config.model.attention_bias is (bias in ("true", "yes", "on"))
    assert config.model.hidden_size == TINY.hidden_size


def test_overrides_may_hold_lists_sections_nothing_and_equals_signs(base):
    config = load_config(
        base, ["model.layer_pattern=[sliding, full]", "model={sliding_window: 5}", "sample.prompt=a=b"]
    )
    assert config.model.layer_pattern == ("sliding", "full")
    assert config.model.sliding_window == 5
    assert config.model.hidden_size == TINY.hidden_size
    assert config.sample.prompt == "a=b"
    assert load_config(base, ["model.sliding_window=null"]).model.sliding_window is None


def test_a_configuration_extends_another(base, tmp_path):
    (tmp_path / "deep").mkdir()
    middle = written(tmp_path, f"extends: {base}\ntrain: {{log_every: 5}}\nmodel: {{head_bias: true}}\n", "middle.yaml")
    top = written(tmp_path / "deep", "extends: ../middle.yaml\ntrain: {batch: {tokens: 64}}\n")
    config = load_config(top)
    assert (config.train.log_every, config.train.batch.tokens, config.model.head_bias) == (5, 64, True)
    assert config.model == dataclasses.replace(TINY, head_bias=True)
    assert load_config(middle).train.batch == SMALL.train.batch
    lists = written(tmp_path, "extends: middle.yaml\ndata: {suffixes: [.md]}\n", "lists.yaml")
    assert load_config(lists).data.suffixes == (".md",), "a list replaces, it is not appended"


def test_a_file_that_is_no_configuration_is_refused_without_being_read_whole(tmp_path):
    assert "is larger than the limit of 262,144 bytes" in refused_to_load(Path("/dev/zero"))
    assert "is larger than the limit of 262,144 bytes" in refused_to_load(written(tmp_path, "# é\n" * 10**6))
    for index in range(30):
        written(tmp_path, f"extends: {index + 1}.yaml\n", f"{index}.yaml")
    assert "21.yaml is reached through more than 20 extends" in refused_to_load(tmp_path / "0.yaml")


def test_extending_in_a_circle_is_refused_to_load(base, tmp_path):
    written(tmp_path, "extends: b.yaml\n", "a.yaml")
    written(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "extends itself" in refused_to_load(tmp_path / "a.yaml")
    assert "extends itself" in refused_to_load(written(tmp_path, "extends: ./run.yaml\n"))
    (tmp_path / "b.yaml").write_text("# nothing\n")
    assert "model, phases must be set" in refused_to_load(written(tmp_path, "extends: b.yaml\n"))
    assert "must be the path" in refused_to_load(written(tmp_path, "extends: [a.yaml]\n"))
    assert "none.yaml does not exist" in refused_to_load(written(tmp_path, "extends: none.yaml\n"))


@pytest.mark.parametrize(("override", "message"), [
    ("train.log_evry=5", "The key train.log_evry is unknown. Did you mean train.log_every?"),
    ("trian.log_every=5", "Did you mean train?"),
    ("num_layers=2", "Did you mean model.num_layers?"),
    ("model.num_heads=4", "Here it is model.num_query_heads."),
    ("early_stopping_patience=3", "Here it is evaluation.patience, in evaluations."),
    ("lora.dropout=0.1", "The key lora.dropout is unknown. ZAYA1 has no dropout."),
    ("phases=read", "phases is 'read', but must be a list."),
    ("phases.train.tokens=100k", "is '100k' (text), but must be a whole number, such as 100_000."),
    ("phases.train.tokens=12345678901234567G", "but must be a whole number, such as 12345678901234567_000_000_000."),
    ("phases.train.tokens=2K", "but must be a whole number, such as 2_000."),
    ("tokens=1", "Did you mean phases.train.tokens or phases.train.batch.tokens or train.batch.tokens?"),
    ("phases.trian.tokens=1", "Did you mean phases.train?"),
    ("optimizer.muon.learning_rat=1", "Did you mean optimizer.muon.learning_rate?"),
    ("model.zzz=1", "The key model.zzz is unknown. Allowed keys: vocab_size, "),
    ("extends=x", "The key extends is unknown"),
    ("train.compute_dtype=bfloat1", "must be one of float32, bfloat16, float64. Did you mean bfloat16?"),
    ("preset=tpu", "preset is 'tpu', but must be one of cpu, mi300x, mi355x, h100, h200."),  # none is near
    ("model.layer_pattern=[full, slidng]", "model.layer_pattern.1 is 'slidng'"),
    ("data.suffixes=[.py, 3]", "data.suffixes.1 is 3 (a whole number), but must be text"),
    ("train.log_every", "must have the form section.key=value"),
    ("=5", "must have the form section.key=value"),
    ("train.log_every=[1", "The value of the override 'train.log_every=[1' is not valid YAML"),
])  # fmt: skip
def test_a_wrong_override_is_named_with_the_nearest_spelling(base, override, message):
    assert message in refused_to_load(base, override)


WRONG_TYPES = {
    "a whole number": [("train.log_every", "true"), ("train.log_every", "many"), ("train.log_every", ""),
                       ("train.log_every", "[1]"), ("model.sliding_window", "x"), ("train.log_every.more", "1")],
    "a finite number": [("optimizer.clip_norm", value) for value in ("fast", "true", ".inf", ".nan", "'nan'", "null")],
    "true or false": [("model.attention_bias", value) for value in ("1", "'true'")],
    "a list": [("model.layer_pattern", "full")],
    "a section with keys": [("model", "3"), ("data", "null")],
    "one of none, dots, full": [("train.remat", "[full]")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "allowed"), [(*pair, allowed) for allowed, pairs in WRONG_TYPES.items() for pair in pairs]
)
def test_a_value_of_the_wrong_type_is_named_with_what_is_allowed(base, key, value, allowed):
    message = refused_to_load(base, f"{key}={value}")
    assert message.startswith(key.removesuffix(".more") + " is ")
    assert f", but must be {allowed}" in message


@pytest.mark.parametrize("text", ["1000000", "1_000_000", "1e6", "1.0e6", "1E+6", "10_0e4", "1000000.0"])
def test_a_whole_number_may_be_written_with_an_exponent(base, tmp_path, text):
    assert load_config(base, [f"phases.0.tokens={text}"]).phases[0].tokens == 10**6
    file = written(tmp_path, f"extends: {base}\nphases: {{train: {{tokens: {text}}}}}\n")
    assert type(load_config(file).phases[0].tokens) is int


@pytest.mark.parametrize("text", ["1.5", "15e-1", "1e400", "1e99999999", "1e3x", "'5'", "1_e3", "e3", "nan", ".nan"])
def test_what_is_no_whole_number_is_refused(base, text):
    assert refused_to_load(base, f"phases.0.tokens={text}").startswith("phases.train.tokens is ")


def test_a_phase_without_a_name_has_that_of_the_default(base, tmp_path):
    file = written(tmp_path, f"extends: {base}\nphases: [{{tokens: 8192}}]\n")
    assert load_config(file, ["phases.train.tokens=16384"]).phases[0].tokens == 16384
    top = written(tmp_path, "extends: run.yaml\nphases: {0: {tokens: 24576}}\n", "top.yaml")
    assert load_config(top).phases[0].tokens == 24576
    alone = refused_to_load(written(tmp_path, "phases: {0: {tokens: 1}}\nmodel: {}\n", "alone.yaml"))
    assert "model.vocab_size" in alone


@pytest.mark.parametrize("name", ["a\x00b", "a" * 256])
def test_a_path_that_no_file_system_takes_is_refused(base, name):
    assert ", which is not a valid path: " in refused_to_load(base, f"run_dir={name}")


@given(HOSTILE_NAMES)
def test_a_path_is_taken_as_it_is_typed_and_survives_a_file(name):
    assume(name[0] not in "'\"" and name not in ("null", "~"))
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder), to_yaml(SMALL))
        loaded = load_config(file, [f"run_dir={name}", f"data.corpus={name}"])
        assert (loaded.run_dir, loaded.data.corpus) == (name, name)
        assert load_config(file, [f"run_dir={json.dumps(name)}"]).run_dir == name
        assert load_config(written(Path(folder), to_yaml(loaded))) == loaded


@pytest.mark.parametrize("override", [
    f"run_dir=[{'9, ' * 2000}]", f"seed={'x' * 100_000}", f"{'x' * 100_000}=1", f"model.{'x' * 100_000}=1",
    f"seed=0x{'f' * 60_000}", f"{'x' * 100_000}", f"phases.{'x' * 10_000}.tokens=1", ".".join("a" * 5000) + "=1",
    f"model.layer_pattern=[{'full, ' * 2000}]",
    f"data.suffixes={{a: {'[' * 30}{']' * 30}}}", "model={a: &x [*x]}", f"seed={'[' * 1000}",
    f"phases.{'9' * 5000}.tokens=1",
])  # fmt: skip
def test_what_is_huge_is_refused_in_few_words(base, override):
    assert len(refused_to_load(base, override)) < 1000


@pytest.mark.parametrize("override", [
    "model={1.5: 2}",  # a key that is not text
    "seed=2024-99-99",  # YAML takes it for a date
    "seed=0x_",  # YAML takes it for a number
    "train={log_every: 1, log_every: 2}",  # a key given twice
])  # fmt: skip
def test_an_override_yaml_stumbles_over_is_refused_too(base, tmp_path, override):
    refused_to_load(base, override)
    text = override.replace("=", ": ", 1)
    assert "run.yaml" in refused_to_load(written(tmp_path, f"extends: {base}\n{text}\n"))


@pytest.mark.parametrize(("text", "message"), [
    ("train:\n  log_every: 1\n  seed: 3\n  log_every: 2\n", "The key 'log_every' appears twice; the second"),
    ("- 1\n", "is a list, but must be a section with keys"),
    ("just text\n", "is text, but must be a section with keys"),
    ("train: [\n", "run.yaml is not valid YAML: while parsing a flow node"),
    ("train: [\n", "but found '<stream end>' at line 2, column 1"),
    ("1: 2\n", "The key 1 is unknown"),
    ("[a]: 2\n", "YAML reads the key on line 1 as"),
    ("run_dir: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ("seed: 3\n", "model, phases must be set: there is no default."),
    ("", "run.yaml is empty."),
    ("# nothing\n", "run.yaml is empty."),
    ("model: {hidden_size: 8}\n", "model.vocab_size, model.num_layers, model.num_query_heads, "),
])  # fmt: skip
def test_a_wrong_file_is_named(tmp_path, text, message):
    assert message in refused_to_load(written(tmp_path, text))


def test_files_that_cannot_be_read_are_named(tmp_path):
    assert "nothing.yaml does not exist." in refused_to_load(tmp_path / "nothing.yaml")
    assert "cannot be read: Is a directory" in refused_to_load(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes("run_dir: caf\xe9\n".encode("latin-1"))
    assert "is not UTF-8 text" in refused_to_load(path)


def test_the_tree_is_plain_and_in_the_order_of_the_fields():
    tree = to_dict(SMALL)
    assert list(tree) == [field.name for field in dataclasses.fields(Config)]
    assert tree["model"]["layer_pattern"] == ["full"]
    assert tree["optimizer"]["muon"] == dataclasses.asdict(SMALL.optimizer.muon)


@pytest.mark.parametrize(("section", "key"), RENAMED)
def test_a_key_of_an_earlier_version_is_refused_with_its_name_now(base, section, key):
    key_prefix = {"batch": "train.batch", "muon": "optimizer.muon"}.get(section, section)
    message = refused_to_load(base, f"{key_prefix}.{key}=1")
    assert f"{key_prefix}.{key} " in message
    assert f"{key_prefix}.{RENAMED[section, key]}" in message


def test_what_an_earlier_version_saved_is_read():
    earlier = {(section, current): key for (section, key), current in RENAMED.items()}

    def as_saved_then(tree, section=""):
        if isinstance(tree, list):
            return [as_saved_then(item) for item in tree]
        if isinstance(tree, dict):
            return {earlier.get((section, key), key): as_saved_then(value, key) for key, value in tree.items()}
        return tree

    for path in sorted(GOLDEN.glob("*.yaml")):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        then = as_saved_then(tree)
        assert then != tree
        assert with_current_keys(then) == tree
        assert [current_key(key) for key, _ in flatten_keys(then)] == [key for key, _ in flatten_keys(tree)]
