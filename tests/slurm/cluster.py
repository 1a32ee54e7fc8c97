"""A private Slurm on this machine: munged, slurmctld and two slurmd with eight pretended GPUs each.

Needs root and the packages slurm-wlm and munge; nothing of a system-wide Slurm is read or written.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MpiDefault=none
KillWait=30
JobRequeue=1
MinJobAge=3600
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=64 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=64 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    def __init__(self) -> None:
        # Sockets have short paths only, and munged wants a folder that others cannot write.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._write_files()
        self._start()

    def _write_files(self) -> None:
        ports = [_free_port() for _ in range(3)]
        text = CONFIG.format(
            host=socket.gethostname().split(".")[0],
            folder=self.folder,
            port=ports[0],
            port1=ports[1],
            port2=ports[2],
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _start(self) -> None:
        here = self.folder
        munged = ["munged", "--force", f"--key-file={here}/munge.key"]
        munged += [f"--socket={here}/munge.socket", f"--pid-file={here}/munged.pid"]
        munged += [f"--log-file={here}/munged.log", f"--seed-file={here}/munge.seed"]
        for command in (
            munged,
            ["slurmctld", "-c"],
            ["slurmd", "-N", "n1"],
            ["slurmd", "-N", "n2"],
        ):
            subprocess.run(command, env=self.environment, check=True, capture_output=True)
        end = time.monotonic() + 30
        while self.call("sinfo", "-h", "-o", "%T").split() != ["idle"]:
            assert time.monotonic() < end, self.call("sinfo", "-N", "-l")
            time.sleep(0.3)

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def submit(self, repository: Path, *arguments: str, variables: dict[str, str]) -> str:
        """sbatch from the repository's root; the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={self.folder}/job-%j.out", *arguments],
            cwd=repository,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Such as RUNNING, PENDING, COMPLETED; of an array, all different ones."""
        lines = self.call("scontrol", "show", "job", job).splitlines()
        states = [line.split("JobState=")[1].split()[0] for line in lines if "JobState=" in line]
        return ",".join(sorted(set(states)))

    def restarts(self, job: str) -> int:
        shown = self.call("scontrol", "show", "job", job)
        return int(shown.split("Restarts=")[1].split()[0])

    def until(self, job: str, states: set[str], seconds: float = 120) -> str:
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {state}\n{self.output()}"
            time.sleep(0.3)
        return state

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("job-*.out")))

    def stop(self) -> None:
        self.call("scancel", "--state=RUNNING", "--signal=KILL")
        self.call("scancel", "--me")
        for name in ("slurmd-n1", "slurmd-n2", "slurmctld", "munged"):
            with suppress(OSError, ValueError):
                os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGTERM)
        time.sleep(1)
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
