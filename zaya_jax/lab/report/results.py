"""Read the results in a folder: which verb wrote each, what failed, and the hardware that it is of."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.run.files import read_json

_COMMAND = "python -m zaya_jax.machine"
_CONTEXT = "memory per device (bytes) and time (s) of context-parallel attention, forward and backward"
# In the order of the page; verbs and the benchmarks of their results.
_VERBS = {
    "describe": [],
    "preflight": ["preflight"],
    "memory": ["memory bandwidth"],
    "gemm": ["matrix products"],
    "collectives": ["collectives", "messages of a training step"],
    "storage": ["storage"],
    "step": ["training step by part", "prefill by part", "decode step by part"],
    "context": [_CONTEXT],
    "sizing": [],
}
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


def read_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Read all JSON files of a folder: the results, in the order of the page, and the names of other files.

    Raises:
      InputError: a file is damaged, or there is no result.
    """
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
    """Return the kind of the devices that a result is of, '' if none was measured or they were simulated, and the CPU.

    The CPU is '' if it was not recorded.
    """
    content = result.content
    if result.verb == "sizing":  # needs no device, and names the hardware that it is about
        return "", ""
    hardware = content.get("hardware", {})
    device = re.sub(r"^\d+ × ", "", (content if result.verb == "describe" else hardware).get("device", ""))
    processor = f"{hardware['cpu']} with {hardware['cpus']} CPUs" if hardware else ""
    return "" if "simulated" in device else device, processor


def differences(hardware: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the name of the machine, and a sentence if the results are of different hardware, else ''.

    `hardware` has device and processor of each result, by its file.
    """
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
