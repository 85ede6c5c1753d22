"""All processes of a job on CPUs use what process 0 has compiled in an earlier job."""

import os
import subprocess
import sys

from tests.compile_helpers import CHEAP
from tests.parallel.processes_helpers import free_port
from tests.train_helpers import ROOT

CODE = """
import sys
import jax
from zaya_jax.parallel.multihost import join

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
peers = join(sys.argv[1], 2, int(sys.argv[2]), 60, 60.0)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
x = jax.make_array_from_callback((4,), rows, lambda index: jax.numpy.arange(4.0)[index])
hits.clear()
total = jax.jit(lambda x: (x * x).sum(), out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))(x)
print(float(total), len(hits))
"""


def start(folder):
    """Run a job of two processes; gives what each printed: a sum over both, and how much it took from the cache."""
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": CHEAP,
                   "JAX_COMPILATION_CACHE_DIR": str(folder)}  # fmt: skip
    job = [subprocess.Popen([sys.executable, "-c", CODE, address, str(process)], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE) for process in range(2)]  # fmt: skip
    said = [process.communicate(timeout=100)[0].splitlines()[-1].split() for process in job]
    assert [process.returncode for process in job] == [0, 0]
    return said


def test_a_second_job_compiles_nothing_in_any_process(tmp_path):
    first, other = start(tmp_path)  # The other process compiles too, unless the first had already written its program.
    assert (first, other[0]) == (["14.0", "0"], "14.0")
    assert start(tmp_path) == [["14.0", "1"]] * 2
