"""Read the results in a folder: which verb wrote each, what failed, and the hardware that it is of."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.run.files import read_json

_COMMAND = "python -m zaya_jax.machine"
# In the order of the page.
_VERBS = {
    "preflight": "preflight",
    "memory bandwidth": "memory",
    "matrix products": "gemm",
    "collectives": "collectives",
    "messages of a training step": "collectives",
    "storage": "storage",
    "training step by part": "step",
    "prefill by part": "step",
    "decode step by part": "step",
    "memory per device (bytes) and time (s) of context-parallel attention, forward and backward": "context",
}
# Of verbs without a short `benchmark`.
_TITLES = {"describe": "Devices and software", "context": "Context-parallel attention", "sizing": "Sizing rules"}
VERBS = tuple(dict.fromkeys(("describe", *_VERBS.values(), "sizing")))


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
    """Read all JSON files of a folder.

    Returns:
      The results, in the order of the page; the names of files that are not among them.

    Raises:
      InputError: a file is damaged, or there is no result.
    """
    results, ignored = list[Result](), list[str]()
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        verb = _verb(content)
        if verb is None:
            ignored.append(path.name)
        else:
            results.append(Result(path.name, verb, content))
    if not results:
        raise InputError(f"{folder} has no results. Each of these commands writes one: {_COMMAND} describe > "
                         f"{folder}/describe.json, and {_COMMAND} VERB --output {folder}/VERB.json, where VERB is "
                         f"{', '.join(VERBS[1:-1])} or {VERBS[-1]}.")  # fmt: skip
    return sorted(results, key=lambda result: VERBS.index(result.verb)), ignored


def notes(result: Result) -> list[dict[str, str]]:
    """Return what failed or was skipped: the `status`, its `part` ('' for the whole result), and a `text`."""
    parts = {"": result.content}
    if result.verb == "gemm":
        parts |= {f"{row['family']} {row['name']}": row for row in result.content["results"]}
    return [{"status": status, "part": name, "text": part[status]} for name, part in parts.items()
            for status in ("failed", "skipped") if isinstance(part.get(status), str)]  # fmt: skip


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

    Args:
      hardware: device and processor of each result, by its file.
    """
    devices, processors = dict[str, list[str]](), dict[str, list[str]]()
    for file, names in hardware.items():
        for kinds, name in zip((devices, processors), names, strict=True):
            if name:
                kinds.setdefault(name, []).append(file)
    accelerators = [device for device in devices if device != "cpu"]
    name = " and ".join(accelerators or processors or devices)
    lists = ["; ".join(f"{kind} ({', '.join(files)})" for kind, files in kinds.items())
             for kinds in (devices, processors) if len(kinds) > 1]  # fmt: skip
    return name, f"These results are of different machines or devices: {'. '.join(lists)}." if lists else ""


def _verb(content: Any) -> str | None:
    if not isinstance(content, dict):
        return None
    if content.keys() >= {"platform", "device", "devices", "drivers", "network"}:
        return "describe"
    if content.keys() >= {"config", "phases"}:
        return "sizing"
    benchmark = content.get("benchmark")
    return _VERBS.get(benchmark) if isinstance(benchmark, str) else None
