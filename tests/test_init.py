import json
import subprocess
import sys
from pathlib import Path

import pytest

import zaya_jax

ROOT = Path(__file__).parent.parent
# `train` and `generate` are functions and rooms of one name: importing the room must not take the function away.
ORDERS = {
    "names first": "from zaya_jax import train, generate; import zaya_jax.train.loop, zaya_jax.generate.decode",
    "rooms first": "import zaya_jax.train.loop, zaya_jax.generate.decode; from zaya_jax import train, generate",
    "by attribute": "import zaya_jax; train, generate = zaya_jax.train, zaya_jax.generate",
    "by attribute after the rooms": (
        "import zaya_jax.train.loop, zaya_jax.generate.decode; train, generate = zaya_jax.train, zaya_jax.generate"
    ),
    "light submodules first": "import zaya_jax.train.tracker; from zaya_jax import train, generate",
}
CHECK = """
from zaya_jax.errors import InputError
for call, arguments in ((train, (None,)), (generate, (None, [[]], 1))):
    assert callable(call), call
    try:
        call(*arguments)
    except (AttributeError, InputError) as error:
        where = error.__traceback__
        while where.tb_next:
            where = where.tb_next
        entered.append(where.tb_frame.f_code.co_name)
"""
# Each order begins without any module of the package; jax, which takes seconds, stays.
EACH = """
import json, sys
found = {}
for name, order in json.loads(sys.argv[1]).items():
    for module in [module for module in sys.modules if module.partition(".")[0] == "zaya_jax"]:
        del sys.modules[module]
    exec(order, {"entered": found.setdefault(name, [])})
print(json.dumps(found))
"""


def test_train_and_generate_can_be_called_whatever_was_imported_before():
    orders = {name: order + CHECK for name, order in ORDERS.items()}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EACH, json.dumps(orders)], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == ORDERS.keys()
    for name, entered in json.loads(done.stdout).items():
        assert entered == ["train", "generate"], name  # the functions of these names were entered


def test_every_promised_name_is_there():
    for name in zaya_jax._HOMES:
        assert getattr(zaya_jax, name) is not None
    namespace = {}
    exec("from zaya_jax import Config, TrainResult, Zaya, load_config, logits", namespace)  # noqa: S102
    assert namespace["Zaya"].__module__ == "zaya_jax.model.zaya"


def test_dir_lists_every_name_once():
    names = dir(zaya_jax)
    assert set(zaya_jax._HOMES) | {"__version__"} <= set(names)
    assert len(names) == len(set(names))


def test_an_unknown_name_is_an_attribute_error_that_lists_the_others():
    with pytest.raises(AttributeError, match=r"zaya_jax has no attribute 'tarin'; it has .*\btrain\b"):
        _ = zaya_jax.tarin
    with pytest.raises(ImportError, match="tarin"):
        exec("from zaya_jax import tarin")  # noqa: S102
