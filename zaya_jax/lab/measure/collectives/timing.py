"""Check the results of collectives, and time one: seconds of each call, the largest over processes."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from zaya_jax.job.multihost import all_gather
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES, label
from zaya_jax.lab.measure.collectives.programs import IN_GRAPH, Case, Programs
from zaya_jax.lab.timing import timed
from zaya_jax.parallel.mesh import AXES, make_mesh, nontrivial_axes

Mode = Literal["dispatch", "graph"]
WARM_UP = 5  # calls before the first timed one
CHECKED = ("float32", "bfloat16", "int32")  # dtypes
_CHUNK = 64  # elements of each device, to check
_PATIENCE = 600  # seconds that processes may take until they start a case


class Timing(NamedTuple):
    """Seconds of one operation in each timed call, and the number of wrong elements over all devices."""

    seconds: list[float]
    wrong: int


def time_case(case: Case, mode: Mode, repeats: int) -> dict[str, Timing]:
    """Check and time a collective, out of place and in place.

    Args:
      case: the collective.
      mode: 'dispatch' times calls of one operation, with what starting a program costs. 'graph' times a program of
        `IN_GRAPH` operations, each of which needs the result of the one before, and divides; only in place.
      repeats: number of timed calls.

    Returns:
      A timing for 'out_of_place' (not in the mode 'graph') and 'in_place'.

    Raises:
      RuntimeError: a compiled program does not contain the collective as often as it should.
    """
    programs = Programs(case)
    wrong, wrong_in_place = wrong_elements(programs)
    if mode == "graph":
        seconds = _time(programs.in_graph, programs.fill_buffer(), repeats, feed=True)
        return {"in_place": Timing([second / IN_GRAPH for second in seconds], wrong_in_place)}
    return {
        "out_of_place": Timing(_time(programs.run, programs.fill(), repeats, feed=False), wrong),
        "in_place": Timing(_time(programs.in_place, programs.fill_buffer(), repeats, feed=True), wrong_in_place),
    }


def wrong_elements(programs: Programs) -> tuple[int, int]:
    """Run a collective once, and count the wrong elements over all devices, out of place and in place."""
    out_of_place = programs.wrong(programs.run(programs.fill()))
    in_place = programs.wrong_buffer(programs.in_place(programs.fill_buffer()))
    return _total(out_of_place), _total(in_place)


def _time(call: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int, *, feed: bool) -> list[float]:
    """Time calls on `x`, or, with `feed`, on the result of the call before."""

    def one_call() -> None:
        nonlocal x
        out = call(x).block_until_ready()
        x = out if feed else x

    timed(one_call, WARM_UP, 0)
    all_gather("collectives", None, _PATIENCE)  # all processes start the timed calls together
    return np.max(all_gather("collectives", timed(one_call, repeats, 0), _PATIENCE), axis=0).tolist()


def _total(wrong: jax.Array) -> int:
    own = sum(int(shard.data.sum()) for shard in wrong.addressable_shards)
    return sum(all_gather("collectives", own, _PATIENCE))


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
        for dtype in CHECKED:
            programs = Programs(Case(collective, mesh, axes, _CHUNK * mesh.size, dtype))
            if sum(wrong_elements(programs)):
                wrong.append(f"{label(collective)} in {dtype}")
    result: dict[str, Any] = {"devices": mesh.size, "dtypes": list(CHECKED)}
    if wrong:
        result["failed"] = f"Wrong results over {mesh.size} devices: {', '.join(wrong)}."
    return result
