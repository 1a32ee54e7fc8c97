"""A private Slurm on this machine: munged, slurmctld and two slurmd with eight pretended GPUs each.

Needs root and the packages slurm-wlm and munge; nothing of a system-wide Slurm is read or written.
"""

import ctypes
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

# cred_expire is also how long a job that is queued again waits (120 s by default); it must outlast
# what lies between a job's start and its step's.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
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
        self._daemons: list[subprocess.Popen[bytes]] = []
        # A session that is ended (by a time limit) takes its jobs along: pytest tears down as on Ctrl-C.
        self._on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._write_files()

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

    def start(self) -> None:
        """Returns when both nodes are idle."""
        here = self.folder
        munged = ["munged", "--force", f"--key-file={here}/munge.key"]
        munged += [f"--socket={here}/munge.socket", f"--pid-file={here}/munged.pid"]
        munged += [f"--log-file={here}/munged.log", f"--seed-file={here}/munge.seed"]
        for command in (
            [*munged, "--foreground"],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=_end_with_parent,
                )
            )
            end = time.monotonic() + 20  # slurmctld's credentials need the socket
            while command[0] == "munged" and not (here / "munge.socket").exists():
                assert time.monotonic() < end, (here / "munged.log").read_text()
                time.sleep(0.1)
        end = time.monotonic() + 60
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
        with suppress(subprocess.TimeoutExpired):  # slurmctld may be what is broken
            self.call("scancel", "--me", "--full", "--signal=KILL")
            self.call("scancel", "--me")
            end = time.monotonic() + 15
            while self.call("squeue", "-h", "--me") and time.monotonic() < end:
                time.sleep(0.3)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        self._kill_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, self._on_term)

    def _kill_leftovers(self) -> None:
        """Steps outlive their slurmd by design: all that carry this cluster's configuration end."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)


def _end_with_parent() -> None:
    """In the child: a test session that is killed leaves no daemons."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
