"""The results in a folder as a page that loads nothing: which verb wrote each, what failed, and their hardware."""

import base64
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.lab.report.tables import CONTEXT, TABLES
from zaya_jax.lab.result_plots import draw
from zaya_jax.run.files import read_json, write_atomically
from zaya_jax.run.page import render
from zaya_jax.run.writing import resolved

_TEMPLATE = Path(__file__).parent / "machine.html.j2"
_COMMAND = "python -m zaya_jax.machine"
# In the order of the page; verbs and the benchmarks of their results.
_STEPS = ["training step by part", "prefill by part", "decode step by part"]
_VERBS = {"describe": [], "preflight": ["preflight", "doctor"], "memory": ["memory bandwidth"]}
_VERBS |= {"gemm": ["matrix products"], "collectives": ["collectives", "messages of a training step"]}
_VERBS |= {"storage": ["storage"], "step": _STEPS}
_VERBS |= {"context": [CONTEXT], "sizing": []}
VERBS = tuple(_VERBS)
# Of verbs without a short `benchmark`.
_TITLES = {"describe": "Devices and software", "context": "Context-parallel attention", "sizing": "Sizing rules"}


class Result(NamedTuple):
    """A result of a verb."""

    file: str  # name of the file
    verb: str  # the verb that wrote it
    content: dict[str, Any]  # the file's content

    @property
    def title(self) -> str:
        """The name of the measurement."""
        benchmark = self.content.get("benchmark", "")
        return _TITLES.get(self.verb) or benchmark[:1].upper() + benchmark[1:]

    @property
    def command(self) -> str:
        """The command that made it."""
        content = self.content
        if self.verb == "describe":
            return f"{_COMMAND} describe"
        if self.verb == "sizing":
            flags = ["--devices", str(content["devices"]), "--hardware", content["hardware"]]
            return f"{_COMMAND} sizing {shlex.join([content['config'], *content['overrides'], *flags])}"
        return content["command"]


def write_page(folder: Path, page: Path) -> tuple[list[str], list[str]]:
    """Write the page of the results in `folder`; returns the names of their files, and of files that are no results."""
    results, ignored = read_results(folder)
    sections, hardware = [], {}
    for result in results:
        try:
            hardware[result.file] = describe_hardware(result)
            sections.append(_section(result))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            problem = f"{result.file} is a damaged result of machine {result.verb}, or one of another version"
            raise InputError(f"{problem} ({error!r}): write it again.") from error
    name, warning = differences(hardware)
    text = render(_TEMPLATE, name=name, warning=warning, sections=sections, ignored=ignored)
    write_atomically(resolved(page), text)
    return list(hardware), ignored


def _section(result: Result) -> dict[str, Any]:
    """Return what the template shows: `facts` by name, `tables` without empty ones, and the `picture` of `_picture`."""
    content, facts = result.content, {"command": result.command}
    named = {"date": "date", "size": "size", "compared with": "peer"}
    facts |= {label: content[key] for label, key in named.items() if content.get(key)}
    if versions := content.get("versions"):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if processor := describe_hardware(result)[1]:
        hardware = content["hardware"]
        facts["hardware"] = ", ".join(filter(None, (hardware.get("device"), processor, hardware["machine"])))
    tables = [table for table in TABLES[result.verb](content) if table.rows]
    return {"result": result, "facts": facts, "notes": notes(result), "tables": tables, "picture": _picture(result)}


def _picture(result: Result) -> tuple[str, str]:
    """Return the plot as a data URI, and what it shows; two empty texts without a plot."""
    with tempfile.TemporaryDirectory(prefix="zaya_jax_") as folder:
        path = Path(folder) / "plot.png"
        shows = draw(result.verb, path, result.content)
        if not path.exists():
            return "", ""
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}", shows


def read_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Read the JSON files of a folder: results, in the page's order, and other files' names; InputError without any."""
    results, ignored = list[Result](), list[str]()
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        verb = _verb(content) if isinstance(content, dict) else None
        if verb is None:
            ignored.append(path.name)
        else:
            results.append(Result(path.name, verb, content))
    if not results:
        commands = f"{_COMMAND} describe > {folder}/describe.json, and {_COMMAND} VERB --output {folder}/VERB.json"
        commands += f", where VERB is {', '.join(VERBS[1:-1])} or {VERBS[-1]}"
        raise InputError(f"{folder} has no results. Each of these commands writes one: {commands}.")
    return sorted(results, key=lambda result: VERBS.index(result.verb)), ignored


def _verb(content: dict[str, Any]) -> str | None:
    if content.keys() >= {"platform", "device", "devices", "drivers", "network"}:
        return "describe"
    if content.keys() >= {"config", "phases"}:
        return "sizing"
    return next((verb for verb, benchmarks in _VERBS.items() if content.get("benchmark") in benchmarks), None)


def notes(result: Result) -> list[dict[str, str]]:
    """Return what failed or was skipped: the `status`, its `part` ('' for the whole result), and a `text`."""
    parts, found = {"": result.content}, []
    if result.verb == "gemm":
        parts |= {f"{row['family']} {row['name']}": row for row in result.content["results"]}
    for name, part in parts.items():
        texts = {status: part.get(status) for status in ("failed", "skipped")}
        found += [{"status": key, "part": name, "text": text} for key, text in texts.items() if isinstance(text, str)]
    return found


def describe_hardware(result: Result) -> tuple[str, str]:
    """Return the kind of a result's devices, '' if simulated or not measured, and the CPU, '' if not recorded."""
    content = result.content
    if result.verb == "sizing":  # needs no device, and names the hardware that it is about
        return "", ""
    hardware = content.get("hardware", {})
    device = re.sub(r"^\d+ × ", "", (content if result.verb == "describe" else hardware).get("device", ""))
    processor = f"{hardware['cpu']} with {hardware['cpus']} CPUs" if hardware else ""
    return "" if "simulated" in device else device, processor


def differences(hardware: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the machine's name, and a warning, '' if all results, by file, are of the same devices and processors."""
    devices, processors = dict[str, list[str]](), dict[str, list[str]]()
    for file, (device, processor) in hardware.items():
        for kinds, name in ((devices, device), (processors, processor)):
            if name:
                kinds.setdefault(name, []).append(file)
    accelerators = [device for device in devices if device != "cpu"]
    several = [kinds for kinds in (devices, processors) if len(kinds) > 1]
    lists = ["; ".join(f"{kind} ({', '.join(files)})" for kind, files in kinds.items()) for kinds in several]
    warning = f"These results are of different machines or devices: {'. '.join(lists)}." if lists else ""
    return " and ".join(accelerators or processors or devices), warning
