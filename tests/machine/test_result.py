import json
import sys

import pytest

from zaya_jax.errors import InputError
from zaya_jax.machine.result import check_request, describe_run, write_result


def test_a_result_says_how_and_where_it_was_measured(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "step", "--repeats", "3"])
    head = describe_run("speed", "large", "another", ["numpy", "no-such-package"])
    assert (head["benchmark"], head["size"], head["peer"]) == ("speed", "large", "another")
    assert head["command"] == "python -m zaya_jax.bench step --repeats 3"
    assert head["versions"].keys() == {"python", "numpy", "no-such-package"}
    assert head["versions"]["no-such-package"] == "not installed"
    assert head["hardware"].keys() == {"machine", "cpu", "cpus"}
    assert head["hardware"]["cpus"] >= 1


def test_a_result_is_written_where_a_file_is_given(tmp_path):
    write_result({"ratio": 2.0}, str(tmp_path / "result.json"))
    write_result({"ratio": 2.0}, None)
    assert json.loads((tmp_path / "result.json").read_text()) == {"ratio": 2.0}


@pytest.mark.parametrize(("repeats", "output", "match"), [
    (0, None, "--repeats is 0, but must be at least 1"),
    (1, "/no/such/folder/result.json", "--output is '/no/such/folder/result.json'"),
    (1, "/tmp", "--output is '/tmp', but must be a file"),
])  # fmt: skip
def test_what_cannot_be_measured_or_written_is_told(repeats, output, match):
    with pytest.raises(InputError, match=match):
        check_request(repeats, output)


def test_a_file_in_the_working_folder_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_request(1, "result.json")
