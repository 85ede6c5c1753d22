"""Launch files: what each starts, with which flags, and that nothing is left behind."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml
from jax._src.clusters import ClusterEnv

from tests.train_helpers import ROOT, write_run
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.leader_process import leader_address
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.training_command import read_command
from zaya_jax.main import main
from zaya_jax.run.launcher import detect_launcher, node_index

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


def test_slurm_starts_one_supervisor_a_node_that_sees_all_gpus_and_is_told_before_the_end():
    options = sbatch_options()
    assert options["ntasks-per-node"] == "1"
    assert not {"gpus-per-task", "gpu-bind", "ntasks"} & set(options)
    name, _, seconds = options["signal"].partition("@")
    assert (name, int(seconds) > Policy().grace_seconds) == ("TERM", True)
    assert "requeue" in options


# Runs the command for two nodes, of which the second ends with 75, since it was lost.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do printf "%s|" "$1"; shift; done
SLURM_NODEID=1 STATUS=75 "$@" >/dev/null
SLURM_NODEID=0 "$@"
exit 75
"""
# Runs the training command alone.
SRUN_TRAINER = """#!/bin/bash
while [[ $1 != -c ]]; do shift; done
verdict=$3
while [[ $1 != -- ]]; do shift; done
shift
"$@"
echo $? >"$verdict"
"""
SUPERVISOR = '#!/bin/bash\nprintf "%s|" "$@"\nexit $STATUS\n'


@pytest.mark.parametrize(
    ("status", "requeued"), [(0, False), (75, True), (85, True), (137, True), (78, False), (93, False), (95, False)]
)
def test_slurm_runs_supervisors_and_requeues_by_their_exit_code(tmp_path, status, requeued):
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "py", SUPERVISOR)
    program(
        tmp_path,
        "scontrol",
        '#!/bin/bash\n[[ $1 == show ]] && printf "%s\\n" gpu07 gpu08 || echo "$@" >> "$REQUEUED"\n',
    )
    done = shell("bash", str(LAUNCH / "zaya.sbatch"), "--config", "a b.yaml", path=tmp_path, PYTHON="py", SPARES="1",
                 STATUS=str(status), SLURM_JOB_NODELIST="gpu[07-08]", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="4",
                 SLURM_JOB_ID="4097", REQUEUED=str(tmp_path / "requeued"))  # fmt: skip
    assert done.stdout == (
        "--kill-on-bad-exit=0|--wait=0|--no-kill|--gpu-bind=none|-m|zaya_jax.aegis|run|--processes|4|--nodes|1|--spares|1|"
        "--coordinator|gpu07:8476|--|py|-m|zaya_jax.main|--config|a b.yaml|"
    )
    assert (tmp_path / "requeued").exists() == requeued
    assert done.returncode == (0 if requeued else status)


def test_the_supervisor_of_a_node_starts_its_share_of_the_processes(tmp_path):
    """On the second of two nodes with four GPUs each."""
    argv = ["py", "-m", "zaya_jax.main", "--config", str(write_run(tmp_path))]
    command = read_command(argv, 4, None, nodes=2, coordinator="gpu07:8476",
                           environment={"SLURM_NODEID": "1", "SLURM_LOCALID": "0"})  # fmt: skip
    assert node_index({"SLURM_NODEID": "1"}) == command.node == 1
    started = command.processes("unused")
    assert [arguments[-1] for arguments, _ in started] == ["4", "5", "6", "7"]
    assert [variables["JAX_LOCAL_DEVICE_IDS"] for _, variables in started] == ["0", "1", "2", "3"]


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobset():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))


def test_the_jobset_has_a_pod_a_node_and_replaces_those_that_fail(jobset):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["completionMode"], spec["backoffLimit"]) == (1, "Indexed", 20)
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    pods = int(environment["NODES"]) + int(environment["SPARES"])
    assert spec["parallelism"] == spec["completions"] == pods
    (gpus,) = container["resources"]["limits"].values()
    assert f"--processes {gpus} " in container["args"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > Policy().grace_seconds


def test_the_jobset_ends_for_good_on_codes_that_no_restart_helps(jobset):
    rule, *others = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert all(other["action"] == "Ignore" for other in others)
    final = {SupervisorExit.CONFIGURATION, SupervisorExit.DO_NOT_REQUEUE, SupervisorExit.NO_CHECKPOINT,
             SupervisorExit.BUDGET_SPENT, SupervisorExit.SUPERSEDED}  # fmt: skip
    assert set(rule["onExitCodes"]["values"]) == final
    assert jobset["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]


def test_a_request_to_stop_costs_none_of_the_jobset_s_restarts(jobset):
    """A failed pod that is ignored does not fail its job, which would restart the JobSet, but is replaced."""
    _, asked, disrupted = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert asked["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [SupervisorExit.PREEMPTED]}
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    counted = SupervisorExit.RETRY_ELSEWHERE  # or a faulty node would be tried for ever
    rules = [asked, disrupted]
    assert counted not in [code for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())]


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
    port, leader = (port["containerPort"] for port in container["ports"])
    coordinator = f"{name}-{job['name']}-0-0.{name}:{port}"
    assert done.stdout == (
        f"-m zaya_jax.aegis run --processes 8 --nodes 2 --spares 1 --coordinator {coordinator} -- "
        "python -m zaya_jax.main --config configs/zaya1_8b.yaml run_dir=/runs/zaya1_8b\n"
    )
    assert leader_address(coordinator) == (coordinator.removesuffix(f":{port}"), leader)
    argv = done.stdout.split(" -- ")[1].split()
    command = read_command(argv, 8, None, nodes=2, coordinator=coordinator, environment={"JOB_COMPLETION_INDEX": "1"})
    assert str(command.run_dir) == "/runs/zaya1_8b"
    flags = ["--coordinator", coordinator, "--processes", "16", "--process", "8"]
    assert command.processes("unused")[0][0][-6:] == flags


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


def test_the_commands_of_the_manual_are_accepted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    manual = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", manual, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line) for line in blocks.splitlines()]
    starts = {line[0] for line in lines}
    assert starts == {"sbatch", "mpirun", "kubectl", "launch/ssh.sh", "python", "pip", "docker"}
    python = program(tmp_path, "python", ECHO)
    program(tmp_path, "mpirun", '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift 2; done\nexec "$@"\n')
    program(tmp_path, "ssh", SSH)
    skip = "while [[ $1 != %s ]]; do shift; done"
    program(
        tmp_path, "srun", f'#!/bin/bash\n{skip % "-c"}\nverdict=$3\n{skip % "--"}\nshift\n"$@"\necho $? >"$verdict"\n'
    )
    program(tmp_path, "scontrol", "#!/bin/bash\necho gpu07\n")
    program(tmp_path, "sbatch", '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec bash "$@"\n')
    tried = [line for line in lines if line[0] in {"sbatch", "mpirun", "launch/ssh.sh", "python"}]
    assert len(tried) >= 5
    for line in tried:
        done = shell(*line, path=tmp_path, PYTHON=str(python), HOSTS=str(tmp_path / "hosts"),
                     OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="16",
                     SLURM_JOB_NODELIST="gpu07", SLURM_NNODES="1")  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), line
        assert done.stdout
        for dash, module, *arguments in map(shlex.split, done.stdout.splitlines()):
            assert (dash, module) == ("-m", "zaya_jax.main")
            assert main([*arguments, "--print-config"]) == 0
            assert "num_experts" in capsys.readouterr().out
    for path in re.findall(r"(?<!/)\b(?:launch|containers|configs)/[\w.]+\w", manual):
        assert (ROOT / path).is_file(), path
