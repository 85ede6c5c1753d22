"""The alert rules and the dashboard use metrics that the exporter serves, and each rule fires when it should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.aegis.metrics_helpers import ROOT, make_run
from zaya_jax.aegis.exporter import RunReader

RULES = ROOT / "launch" / "prometheus" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
DASHBOARD = json.loads((ROOT / "launch" / "prometheus" / "dashboard.json").read_text(encoding="utf-8"))
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
PROMTOOL = shutil.which("promtool")


def rules():
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def promtool(*arguments):
    assert PROMTOOL, "promtool is not on the PATH. Install it (Debian: prometheus)."
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_and_dashboard_use_metrics_and_labels_that_the_exporter_serves(tmp_path):
    samples = RunReader(make_run(tmp_path / "run")).read()
    names = {sample.name for sample in samples}
    labels = {"job", "instance", *(label for sample in samples for label in sample.labels)}
    variables = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"][1:]]
    for text in [rule["expr"] for rule in rules()] + [target["expr"] for target in TARGETS] + variables:
        used = set(re.findall(r"zaya_\w+", text))
        assert used, text
        assert used <= names, text
        matched = re.findall(r"(\w+)=~", text) + re.findall(r"\w+", " ".join(re.findall(r"(?:by|on) \((.*?)\)", text)))
        assert set(matched) <= labels, text
    for text in [rule["annotations"]["summary"] for rule in rules()] + [target["legendFormat"] for target in TARGETS]:
        assert set(re.findall(r"\$labels\.(\w+)|{{(\w+)}}", text)) <= {(label, "") for label in labels} | {
            ("", label) for label in labels}, text  # fmt: skip


def test_a_rule_says_how_bad_it_is_and_what_to_do():
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]


def test_each_rule_has_a_case_in_which_it_fires():
    fired = set(re.findall(r'alertname="(\w+)"', CASES.read_text(encoding="utf-8")))
    assert {rule["alert"] for rule in rules()} == fired


def test_the_panels_have_places_of_their_own_and_the_chosen_data_source():
    panels = DASHBOARD["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = [panel["gridPos"] for panel in panels]
    cells = [(x, y) for place in places for x in range(place["x"], place["x"] + place["w"])
             for y in range(place["y"], place["y"] + place["h"])]  # fmt: skip
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert {each["datasource"]["uid"] for each in (*panels, *TARGETS)} == {"${datasource}"}
    assert DASHBOARD["templating"]["list"][0]["name"] == "datasource"


@pytest.mark.soak
def test_promtool_accepts_the_rules():
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))


@pytest.mark.soak
def test_promtool_accepts_the_expressions_of_the_dashboard(tmp_path):
    records = [{"record": f"panel:{index}", "expr": target["expr"]} for index, target in enumerate(TARGETS)]
    path = tmp_path / "records.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}), encoding="utf-8")
    assert f"{len(TARGETS)} rules found" in promtool("check", "rules", str(path))


@pytest.mark.soak
def test_the_rules_fire_when_they_should():
    assert "SUCCESS" in promtool("test", "rules", str(CASES))
