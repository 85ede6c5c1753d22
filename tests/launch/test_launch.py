"""Launch files: what each starts, with which flags, and that nothing is left behind."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from jax._src.clusters import ClusterEnv

from tests.train_helpers import ROOT
from zaya_jax.run.launcher import detect_launcher

LAUNCH = ROOT / "launch"
SBATCH = (LAUNCH / "zaya.sbatch").read_text(encoding="utf-8")
# Runs what it is told where it is, as the login shell of a host would.
SSH = """#!/bin/bash
while [[ $1 == -o ]]; do shift 2; done
echo "$1" >> "$HOSTS"
exec bash -c "$2"
"""
ECHO = '#!/bin/bash\nprintf "%s\\n" "$*"\n'


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def shell(*command: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`command` with the programs in `path` before all others, and nothing of this process's environment."""
    return subprocess.run(
        command, cwd=ROOT, env={"PATH": f"{path}:{os.environ['PATH']}", **environment}, text=True, capture_output=True,
        timeout=120, check=False,
    )  # fmt: skip


# --- Slurm -----------------------------------------------------------------------------------------------------------


def sbatch_options() -> dict[str, str]:
    lines = SBATCH.splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(lines.index(option) for option in options) < first_command, "sbatch reads no option after a command"
    matches = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", option) for option in options]
    assert all(matches), options
    return {match[1]: match[2] or "" for match in matches if match}


def test_slurm_starts_one_task_a_gpu_and_lets_each_see_all():
    options = sbatch_options()
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert not {"gpus-per-task", "gpu-bind", "ntasks"} & set(options)


def test_slurm_runs_the_trainer_with_the_arguments_given(tmp_path):
    program(tmp_path, "srun", '#!/bin/bash\nprintf "%s|" "$@"\n')
    done = shell("bash", str(LAUNCH / "zaya.sbatch"), "--config", "a b.yaml", path=tmp_path, PYTHON="py")
    assert done.stdout == "--kill-on-bad-exit=1|--gpu-bind=none|py|-m|zaya_jax.main|--config|a b.yaml|"


def test_what_slurm_tells_a_task_is_what_jax_takes(monkeypatch):
    per_node, rank = int(sbatch_options()["ntasks-per-node"]), 11
    tasks = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NTASKS": str(2 * per_node),
             "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank - per_node)}  # fmt: skip
    for name, value in tasks.items():
        monkeypatch.setenv(name, value)
    assert detect_launcher(os.environ) == "Slurm"
    detected = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 1)
    assert detected == (
        "gpu07:61441",
        2 * per_node,
        rank,
        [rank - per_node],
    )  # one GPU, by its number on the node


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobset():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))


def test_the_jobset_has_a_pod_a_node_that_restart_together(jobset):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["completionMode"], spec["backoffLimit"]) == (1, "Indexed", 0)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(environment["PROCESSES"])
    (gpus,) = container["resources"]["limits"].values()
    assert environment["JAX_LOCAL_DEVICE_IDS"] == ",".join(map(str, range(gpus)))
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_jobset_starts_each_process_with_its_flags(jobset, tmp_path):
    (job,) = jobset["spec"]["replicatedJobs"]
    name, (container,) = jobset["metadata"]["name"], job["template"]["spec"]["template"]["spec"]["containers"]
    fields = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
              for entry in container["env"] if "valueFrom" in entry}  # fmt: skip
    assert fields == {"JOBSET_NAME": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}
    environment = {entry["name"]: entry.get("value", name) for entry in container["env"]}
    program(tmp_path, "python", ECHO)
    done = shell(*container["command"], *container["args"], path=tmp_path, JOB_COMPLETION_INDEX="1", **environment)
    # JobSet calls a pod JOBSET-REPLICATEDJOB-JOB-INDEX, in the subdomain of the JobSet's name.
    (port,) = (port["containerPort"] for port in container["ports"])
    flags = f"--coordinator {name}-{job['name']}-0-0.{name}:{port} --processes 2 --process 1"
    assert done.stdout == f"-m zaya_jax.main --config configs/zaya1_8b.yaml run_dir=/runs/zaya1_8b {flags}\n"

    program(tmp_path, "python", f'#!/bin/bash\nexec {sys.executable} "$@" --print-config\n')
    done = shell(*container["command"], *container["args"], path=tmp_path, JOB_COMPLETION_INDEX="0", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run_dir: /runs/zaya1_8b" in done.stdout


# --- ssh -------------------------------------------------------------------------------------------------------------


def over_ssh(folder: Path, *arguments: str, python: str, hosts: str = "one,me@two") -> subprocess.Popen[str]:
    program(folder, "ssh", SSH)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOSTS": str(folder / "hosts"), "PYTHON": python,
                   "DIRECTORY": str(ROOT), "TMPDIR": str(folder)}  # fmt: skip
    # What runs in the background of a shell ignores Ctrl-C, and so would what it starts.
    return subprocess.Popen([LAUNCH / "ssh.sh", hosts, *arguments], env=environment, text=True, cwd=folder,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # noqa: PLW1509 # fmt: skip


def test_each_host_runs_one_process_with_its_flags(tmp_path):
    python = program(tmp_path, "python", '#!/bin/bash\necho "$PWD" "$#" "$*"\n')
    running = over_ssh(tmp_path, "--config", "it's a $HOME.yaml", python=str(python), hosts="me@one,two,three")
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    assert sorted((tmp_path / "hosts").read_text().split()) == ["me@one", "three", "two"]
    command = f"{ROOT} 10 -m zaya_jax.main --config it's a $HOME.yaml --coordinator one:8476 --processes 3 --process"
    assert sorted(out.splitlines()) == [f"{command} {process}" for process in range(3)]
    assert list(tmp_path.glob("tmp*")) == []


# Process 0 waits for as long as it is let; it says its number once it ignores what is `ignored`.
PATIENT = """#!/bin/bash
if [[ "${@: -1}" == 0 ]]; then IGNORED echo $$ > FOLDER/pid; exec sleep 600; fi
until [[ -s FOLDER/pid ]]; do sleep 0.05; done
OTHER
"""


def patient(folder: Path, ignored: str = "", other: str = "exec sleep 600") -> str:
    text = PATIENT.replace("IGNORED", ignored).replace("FOLDER", str(folder)).replace("OTHER", other)
    return str(program(folder, "python", text))


def process_zero(folder: Path) -> psutil.Process:
    for _ in range(600):
        if (folder / "pid").exists() and (number := (folder / "pid").read_text()):
            return psutil.Process(int(number))
        time.sleep(0.05)
    raise AssertionError("process 0 did not begin")


@pytest.mark.parametrize("ignored", ["", "trap '' TERM;"])
def test_where_one_process_fails_the_others_are_ended(tmp_path, ignored):
    running = over_ssh(tmp_path, "--config", "x", python=patient(tmp_path, ignored, "sleep 1; exit 3"))
    waiting = process_zero(tmp_path)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (3, "")
    assert ignored or err == ""
    assert not waiting.is_running()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_launcher(tmp_path, sent):
    running = over_ssh(tmp_path, "--config", "x", python=patient(tmp_path))
    waiting = process_zero(tmp_path)
    running.send_signal(sent)
    running.communicate(timeout=60)
    assert running.returncode in (-sent, 128 + sent)
    waiting.wait(timeout=30)


def test_ssh_without_arguments_says_how_it_is_used():
    done = shell(str(LAUNCH / "ssh.sh"), "one", path=LAUNCH)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ")


# --- the manual ------------------------------------------------------------------------------------------------------


def test_open_mpi_tells_jax_who_is_who(monkeypatch):
    for name, value in {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911", "OMPI_COMM_WORLD_SIZE": "16",
                        "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                        "OMPI_VERSION": "4.1.6"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert detect_launcher(os.environ) == "Open MPI"
    address, *rest = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 1)
    assert address is not None
    assert address.startswith("10.96.0.1:")
    assert rest == [16, 9, [1]]


def test_the_commands_of_the_manual_are_accepted(tmp_path):
    manual = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", manual, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line) for line in blocks.splitlines()]
    starts = {line[0] for line in lines}
    assert starts == {"sbatch", "mpirun", "kubectl", "launch/ssh.sh", "python", "pip", "docker"}
    python = program(tmp_path, "python", f'#!/bin/bash\nexec {sys.executable} "$@" --print-config\n')
    program(tmp_path, "mpirun", '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift 2; done\nexec "$@"\n')
    program(tmp_path, "ssh", SSH)
    program(tmp_path, "srun", '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n')
    program(tmp_path, "sbatch", '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec bash "$@"\n')
    tried = [line for line in lines if line[0] in {"sbatch", "mpirun", "launch/ssh.sh", "python"}]
    assert len(tried) >= 5
    for line in tried:
        done = shell(*line, path=tmp_path, PYTHON=str(python), HOSTS=str(tmp_path / "hosts"),
                     OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="16")  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), line
        assert "num_experts" in done.stdout
    for path in re.findall(r"\b(?:launch|containers|configs)/[\w.]+\w", manual):
        assert (ROOT / path).is_file(), path
