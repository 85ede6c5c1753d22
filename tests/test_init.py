import pytest

import zaya_jax


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
    with pytest.raises(AttributeError, match=r"zaya_jax has no attribute 'tarin'; it has .*\brun_training\b"):
        _ = zaya_jax.tarin
    with pytest.raises(ImportError, match="tarin"):
        exec("from zaya_jax import tarin")  # noqa: S102
