"""TensorBoard and W&B beside `metrics.jsonl`: each step once, resumed or not, and no failure ends the run."""

import itertools
import json
import struct
from pathlib import Path

import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tests.train.test_interruption import metric_rows, train_until
from tests.train_helpers import change, compute_little, small_run
from zaya_jax.config.stages import total_steps
from zaya_jax.errors import InputError
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.run.metrics import read_rows
from zaya_jax.train import sinks
from zaya_jax.train.fit import run_training
from zaya_jax.train.sinks.mirror import Mirror, scalars


@pytest.fixture(autouse=True)
def _nothing(monkeypatch):
    compute_little(monkeypatch)


def events(path: Path):
    """The events of a file, with their checksums checked, as the TFRecord format has them."""
    content, place = path.read_bytes(), 0
    while place < len(content):
        (size,) = struct.unpack_from("<Q", content, place)
        data = content[place + 12 : place + 12 + size]
        for text, offset in ((content[place : place + 8], place + 8), (data, place + 12 + size)):
            (masked,) = struct.unpack_from("<I", content, offset)
            crc = crc32c(text)
            assert masked == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        yield Event.FromString(data)
        place += size + 16


def shown(folder: Path) -> dict[int, dict[str, float]]:
    """What TensorBoard shows: step → tag → value. A session that starts at a step drops what there was from it on."""
    steps: dict[int, dict[str, float]] = {}
    for event in itertools.chain.from_iterable(map(events, sorted(folder.glob("events*")))):
        if event.session_log.status == SessionLog.START:
            steps = {step: values for step, values in steps.items() if step < event.step}
        if event.summary.value:
            assert event.step not in steps, "a step that is written twice"
            steps[event.step] = {value.tag: value.simple_value for value in event.summary.value}
    return steps


def assert_complete(run_dir: Path) -> None:
    """TensorBoard has every row of the metric files, in float32."""
    timings = {row["step"]: row for row in read_rows(run_dir / TIMINGS)}
    expected = {row["step"]: scalars(row) | scalars(timings[row["step"]], "timings/") for row in metric_rows(run_dir)}
    steps = shown(run_dir / "tensorboard")
    assert list(steps) == list(expected)
    for step, values in expected.items():
        assert steps[step] == pytest.approx(values, rel=1e-6)


def test_tensorboard_has_every_row_once_also_of_a_run_that_resumes(tmp_path):
    config = change(small_run(tmp_path), {"train.sinks": ("tensorboard",)})
    train_until(config, 9)  # the newest checkpoint is that of step 5
    folder = Path(config.run_dir) / "tensorboard"
    assert list(shown(folder)) == list(range(1, 9))
    assert {"loss", "load_entropy", "grad_norm_by_role/matrix", "timings/seconds"} <= {*shown(folder)[8]}
    assert_complete(run_training(config).run_dir)
    assert len(list(folder.glob("events*"))) == 2


def test_a_sink_that_is_added_to_a_run_gets_the_earlier_rows(tmp_path):
    config = small_run(tmp_path)
    train_until(config, 9)
    assert_complete(run_training(change(config, {"train.sinks": ("tensorboard",)})).run_dir)


class Flaky:
    """A sink that fails from one of its calls on, until it is mended."""

    def __init__(self, rows, works):
        self.rows, self.works = rows, works

    def write(self, metrics, timings):
        if not self.works():
            raise OSError("No space left on device")
        self.rows.append(metrics["step"])

    def sync(self):
        if not self.works():
            raise ConnectionError
        return ""

    def close(self):
        self.sync()


@pytest.mark.parametrize(("fails", "mended"), [(0, 8), (3, 8), (4, 5), (6, 8), (7, 8), (3, 99)])
def test_a_failing_sink_is_reported_once_and_has_every_row_once_it_works(tmp_path, monkeypatch, fails, mended):
    monkeypatch.setattr("zaya_jax.train.sinks.mirror._PATIENCE", 0)
    messages: list[str] = []
    rows: list[int] = []
    now = 0

    def works():
        return not fails <= now < mended

    def open_sink(after):
        assert works(), "cannot be opened"
        rows[:] = [step for step in rows if step <= after]
        return Flaky(rows, works)

    mirror = Mirror("a sink", open_sink, tmp_path, 0, 0, messages.append, rewinds=True)
    for now in range(1, 10):
        row = {"step": now}
        for name in ("metrics.jsonl", "timings.jsonl"):
            with (tmp_path / name).open("a") as file:
                file.write(json.dumps(row) + "\n")
        mirror.write(row, row)
        if now % 3 == 0:
            assert mirror.sync() == ""
    mirror.close()
    assert rows == (list(range(1, 10)) if mended < 9 else [1, 2])
    assert [text.startswith("train.sinks: a sink failed: ") for text in messages] == [True, False][: len(messages)]
    lacks = "train.sinks: a sink lacks the rows after step 0; rerunning the command writes them."
    assert messages[1:] == (["train.sinks: a sink works again and has all rows."] if mended < 9 else [lacks])


@pytest.mark.parametrize("rewinds", [True, False])
def test_rows_that_a_sink_missed_before_the_process_ended_arrive_once_in_a_later_one(tmp_path, monkeypatch, rewinds):
    monkeypatch.setattr("zaya_jax.train.sinks.mirror._PATIENCE", 0)  # so that only `close` could leave out an attempt
    messages: list[str] = []
    rows: list[int] = []
    kept: list[int] = []
    attempts = 0
    works = True

    def open_sink(after):
        nonlocal attempts
        attempts += 1
        assert works, "cannot be opened"
        if rewinds:
            rows[:] = [step for step in rows if step <= after]
        return Flaky(rows, lambda: works)

    def train(after: int, until: int, fails: int) -> Mirror:
        nonlocal works
        works = True
        lines = [json.dumps({"step": step}) + "\n" for step in range(1, until + 1)]
        for name in (METRICS, TIMINGS):
            (tmp_path / name).write_text("".join(lines[:after]))
        mirror = Mirror("sink", open_sink, tmp_path, 0, after, messages.append, rewinds=rewinds)
        kept[:] = rows
        for step in range(after + 1, until + 1):
            works = step < fails
            for name in (METRICS, TIMINGS):
                with (tmp_path / name).open("a") as file:
                    file.write(lines[step - 1])
            mirror.write({"step": step}, {"step": step})
            if step % 3 == 0:
                mirror.sync()
        return mirror

    train(0, 8, fails=99).close()
    assert rows == list(range(1, 9))
    mirror = train(6, 10, fails=7)  # the checkpoint of step 9 is newer than any row that arrives
    assert kept == list(range(1, 7 if rewinds else 9))
    before = attempts
    mirror.close()
    assert attempts == before, "training does not wait at its end for a sink that has failed"
    assert (
        messages.pop()
        == f"train.sinks: sink lacks the rows after step {6 if rewinds else 8}; rerunning the command writes them."
    )
    train(9, 11, fails=99).close()
    assert rows == list(range(1, 12))
    assert [text.startswith("train.sinks: sink keeps the rows that it has of steps 7 to 8;") for text in messages] == (
        [False] if rewinds else [True, False]
    )


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    config = change(small_run(tmp_path), {"train.sinks": ("tensorboard",)})
    Path(config.run_dir).mkdir(parents=True)
    (Path(config.run_dir) / "tensorboard").write_text("not a folder")
    result = run_training(config)
    assert capsys.readouterr().out.count("train.sinks: tensorboard failed: ") == 1
    steps = [row["step"] for row in metric_rows(result.run_dir)]
    assert steps == list(range(1, total_steps(config) + 1))
    (result.run_dir / "tensorboard").unlink()
    assert_complete(run_training(config).run_dir)


def test_a_package_that_is_missing_is_named_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    monkeypatch.setattr("zaya_jax.train.fit.make_programs", lambda config: pytest.fail("compiles"))
    for name in ("tensorboard", "wandb"):
        config = change(small_run(tmp_path), {"train.sinks": (name,)})
        with pytest.raises(InputError, match=rf"pip install 'zaya-jax\[{name}\]'"):
            run_training(config)
    with pytest.raises(InputError, match="each sink once"):
        change(config, {"train.sinks": ("wandb", "wandb")}).check()


def test_names_in_tensorboard():
    row = {
        "step": 3,
        "loss": 2.0,
        "phase": "a",
        "load": [1.0, 3.0],
        "counts": [[1, 2]],
        "norm": {"x": 1.5},
        "mfu": None,
    }
    assert scalars(row) == {"loss": 2.0, "load": 2.0, "norm/x": 1.5}


def wandb_records(path: Path):
    """The records of a file, which has LevelDB's log format after 7 bytes: blocks of 32 KiB with parts of records."""
    content, place, record = path.read_bytes(), 7, b""
    while place < len(content):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15  # the rest of a block is empty
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or a last part
            yield record
            record = b""


@pytest.mark.soak
def test_wandb_without_a_login_is_reported_before_anything_is_compiled(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setattr("zaya_jax.train.fit.make_programs", lambda config: pytest.fail("compiles"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    wandb.teardown()  # it has read the environment
    for key in ("", "too short"):
        monkeypatch.setenv("WANDB_API_KEY", key)
        with pytest.raises(InputError, match="wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"):
            run_training(change(small_run(tmp_path), {"train.sinks": ("wandb",)}))
    wandb.teardown()


@pytest.mark.soak
def test_wandb_has_every_step_once_without_a_network(tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    config = change(small_run(tmp_path), {"train.sinks": ("wandb",)})
    train_until(config, 9)
    run_dir = run_training(config).run_dir
    ids, steps = set(), []
    for path in sorted((run_dir / "wandb").rglob("*.wandb")):
        for record in map(Record.FromString, wandb_records(path)):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
                assert "timings/seconds" in {item.key or item.nested_key[0] for item in record.history.item}
    assert ids == {(run_dir / "wandb" / "run_id").read_text()}
    assert steps == [row["step"] for row in metric_rows(run_dir)]
