import json

import jax
import pytest

from zaya_jax.config import load_config, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.machine.dry_run import report
from zaya_jax.machine.dry_run.prove import main

SMALL = ["train.batch.tokens=512", "model.num_layers=1", "model.vocab_size=64", "data.context=64"]


@pytest.mark.soak
def test_a_step_is_compiled_for_the_devices_there_are(tmp_path, capsys):
    assert jax.device_count() == 1
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config("configs/tiny.yaml", SMALL)), encoding="utf-8")
    main(str(path), 0)
    assert json.loads(capsys.readouterr().out)["host_bytes"] > 1e7


def test_a_step_that_does_not_compile_is_one_sentence():
    # Eight sequences do not split over three devices; the estimate would have said so first.
    config = load_config("configs/tiny.yaml", SMALL)
    with pytest.raises(InputError, match=r"^The step of phases\.train cannot be compiled for 3 devices: .*"):
        report.prove(config, 0, 3)
