"""Check the results of every collective over all devices."""

from typing import Any

from zaya_jax.machine.collectives.operations import COLLECTIVES, label
from zaya_jax.machine.collectives.programs import Case, Programs
from zaya_jax.machine.collectives.timing import wrong_elements
from zaya_jax.parallel.mesh import AXES, make_mesh, nontrivial_axes

DTYPES = ("float32", "bfloat16", "int32")
_ELEMENTS = 64  # of each device's chunk


def check_collectives() -> dict[str, Any]:
    """Run each collective over all devices of this job, and compare every element.

    Returns:
      `devices`: their number. `dtypes`: those that were checked. `skipped`: a sentence, with only one device.
      `failed`: a sentence, if a result is wrong.
    """
    mesh = make_mesh()
    if mesh.size < 2:
        return {"devices": mesh.size, "skipped": "There is only one device, so there are no collectives to check."}
    axes, wrong = nontrivial_axes(mesh, AXES), []
    for collective in COLLECTIVES.values():
        for dtype in DTYPES:
            programs = Programs(Case(collective, mesh, axes, _ELEMENTS * mesh.size, dtype))
            if sum(wrong_elements(programs)):
                wrong.append(f"{label(collective)} in {dtype}")
    result: dict[str, Any] = {"devices": mesh.size, "dtypes": list(DTYPES)}
    if wrong:
        result["failed"] = f"Wrong results over {mesh.size} devices: {', '.join(wrong)}."
    return result
