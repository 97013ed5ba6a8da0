"""Real Slurm of Debian's packages on this machine: virtual nodes with fake GPUs, slurmdbd on MariaDB, several clusters side by side.

No systemd: every daemon is started here, in the foreground of its own session, and ended here by its pid. Ports and sockets are free ones, paths are
short. What a daemon needs to run on one machine (`config_overrides`, `linuxproc`, cgroup/v1 that nothing touches, character devices as cards) is what
Slurm 22.05 takes. Root only: slurmd becomes the job's account.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DAEMONS = (
    "munged",
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "mariadbd",
    "mariadb-install-db",
    "sbatch",
    "squeue",
    "sacct",
    "sacctmgr",
    "slurmrestd",
)
PACKAGES = "slurm-wlm munge slurmdbd mariadb-server slurmrestd slurm-wlm-jwt-plugin"
# A first start of MariaDB takes seconds at rest; others load both cores of this machine.
LIMIT_S = 90.0
GUEST = "nobody"
ACCOUNT = "intertie"
MODELS = ("a100", "h20")


def missing() -> str:
    """Why there is no real Slurm here; empty if there is."""
    if os.geteuid() != 0:
        return "real Slurm needs root: slurmd becomes the job's account"
    absent = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"{', '.join(absent)} not installed (apt-get install --no-install-recommends {PACKAGES})" if absent else ""


def until(true: object, what: str, limit_s: float = LIMIT_S) -> None:
    """Poll a callable with a deadline."""
    assert callable(true)
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """A port below those that outgoing connections take: Slurm makes many, and one must not sit where a daemon comes back."""
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


@dataclass
class Daemon:
    """One process in a session of its own. `start` may be called again after `kill`."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    uid: int | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                list(self.argv),
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                user=self.uid,
                group=pwd.getpwuid(self.uid).pw_gid if self.uid is not None else None,
                extra_groups=[] if self.uid is not None else None,
                cwd="/",
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: int = signal.SIGTERM, limit_s: float = 15.0) -> None:
        """Only this process: job steps of a slurmd are their own."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(limit_s)

    def kill(self) -> None:
        self.end(signal.SIGKILL)


@dataclass
class Books:
    """munge and the accounting that all clusters of a world share."""

    folder: Path
    munge: Daemon
    database: Daemon
    dbd: Daemon
    dbd_port: int
    daemons: list[Daemon] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "munge.sock"


@dataclass
class Slurm:
    """One cluster. `env` points clients at it."""

    name: str
    folder: Path
    books: Books
    nodes: int
    gpus: int
    ctld: Daemon
    slurmds: dict[str, Daemon]
    rest: Daemon | None = None
    rest_url: str = ""

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.conf), "LC_ALL": "C.UTF-8"}

    def run(self, *argv: str, check: bool = True, timeout_s: float = 30.0) -> str:
        """A client command's standard output."""
        done = subprocess.run(list(argv), env=self.env, capture_output=True, timeout=timeout_s, check=False)
        assert not check or done.returncode == 0, f"{argv}: {done.returncode} {done.stderr.decode(errors='replace')}"
        return done.stdout.decode(errors="replace")

    def token(self, user: str, lifespan_s: int = 600) -> str:
        return self.run("scontrol", "token", f"lifespan={lifespan_s}", f"username={user}").strip().removeprefix("SLURM_JWT=")

    def idle(self) -> bool:
        done = subprocess.run(["sinfo", "-h", "-N", "-p", "train", "-o", "%T"], env=self.env, capture_output=True, timeout=20, check=False)
        return done.returncode == 0 and done.stdout.decode().split().count("idle") == self.nodes

    def answers(self) -> bool:
        return subprocess.run(["scontrol", "ping"], env=self.env, capture_output=True, timeout=20, check=False).returncode == 0

    def restart_without_state(self, first_id: int) -> None:
        """slurmctld with its state lost; it gives out ids from here. (`slurmctld -c` would go on counting.)"""
        conf = self.conf.read_text(encoding="ascii")
        self.ctld.end()
        shutil.rmtree(self.folder / "state")
        (self.folder / "state").mkdir()
        _write(self.conf, f"{conf}FirstJobId={first_id}\n")
        try:
            self.ctld.start()
            until(self.idle, f"the nodes of {self.name} are idle")
        finally:
            _write(self.conf, conf)

    def clear(self) -> None:
        """Cancel everything, and see it gone: job steps outlive every daemon."""
        for daemon in (self.ctld, *self.slurmds.values()):
            if not daemon.alive:
                daemon.start()
        until(self.answers, f"slurmctld of {self.name} answers")

        def empty() -> bool:
            ids = self.run("squeue", "-h", "-o", "%A", check=False).split()
            if ids:
                self.run("scancel", "-f", *ids, check=False)
                time.sleep(0.3)
            return not ids and self.answers()

        with contextlib.suppress(AssertionError):
            until(empty, "the queue is empty", 40.0)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.write_text(text, encoding="ascii")
    path.chmod(mode)


def _books(folder: Path) -> Books:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    env = {"PATH": path, "SLURM_CONF": str(folder / "none.conf"), "LC_ALL": "C.UTF-8"}
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o400)
    mysql = pwd.getpwnam("mysql")
    for name in ("db", "dbrun"):
        (folder / name).mkdir(mode=0o750)
        os.chown(folder / name, mysql.pw_uid, mysql.pw_gid)
    munge = Daemon(
        "munged",
        (
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed", "--num-threads=10"),
        ),
        env,
        folder / "munged.out",
    )
    db_port, dbd_port = free_port(), free_port()
    database = Daemon(
        "mariadbd",
        (
            *(
                "mariadbd",
                "--no-defaults",
                f"--datadir={folder}/db",
                f"--socket={folder}/dbrun/my.sock",
                f"--pid-file={folder}/dbrun/my.pid",
            ),
            *("--bind-address=127.0.0.1", f"--port={db_port}", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"),
            *("--innodb-flush-log-at-trx-commit=2", "--skip-name-resolve"),
        ),
        env,
        folder / "mariadb.out",
        uid=mysql.pw_uid,
    )
    _write(
        folder / "slurmdbd.conf",
        f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.sock\nAuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={folder}/jwt.key\n"
        f"DbdHost=localhost\nDbdAddr=127.0.0.1\nDbdPort={dbd_port}\nSlurmUser=root\nLogFile={folder}/slurmdbd.log\n"
        f"PidFile={folder}/slurmdbd.pid\nStorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort={db_port}\n"
        "StorageUser=slurm\nStoragePass=slurm\nStorageLoc=slurm_acct_db\n",
        0o600,
    )
    (folder / "jwt.key").write_bytes(secrets.token_bytes(32))
    (folder / "jwt.key").chmod(0o600)
    dbd = Daemon("slurmdbd", ("slurmdbd", "-D"), {**env, "SLURM_CONF": str(folder / "slurm.conf")}, folder / "slurmdbd.out")
    return Books(folder, munge, database, dbd, dbd_port, [munge, database, dbd])


def _start_books(books: Books) -> None:
    folder = books.folder
    books.munge.start()
    until(lambda: (folder / "munge.sock").exists(), "munged listens")
    subprocess.run(
        [
            *("mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={folder}/db", "--skip-test-db"),
            "--auth-root-authentication-method=socket",
        ],
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    books.database.start()
    sock = f"--socket={folder}/dbrun/my.sock"
    until(
        lambda: subprocess.run(["mariadb-admin", "--no-defaults", sock, "ping"], capture_output=True, timeout=20).returncode == 0,
        "MariaDB answers",
    )
    grants = "".join(
        f"CREATE USER 'slurm'@'{host}' IDENTIFIED BY 'slurm'; GRANT ALL ON slurm_acct_db.* TO 'slurm'@'{host}';"
        for host in ("localhost", "127.0.0.1")
    )
    subprocess.run(
        ["mariadb", "--no-defaults", sock, "-e", f"CREATE DATABASE slurm_acct_db; {grants}"], check=True, capture_output=True, timeout=30
    )
    books.dbd.start()


def _cluster(name: str, folder: Path, books: Books, nodes: int, gpus: int) -> Slurm:
    for part in ("state", "spool", "log", "run", "gpu", "epilog"):
        (folder / part).mkdir(parents=True)
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    node_lines, gres_lines = [], ["AutoDetect=off"]
    for n in range(1, nodes + 1):
        model = MODELS[(n - 1) % 2]
        node = f"{name}{n}"
        (folder / "spool" / node).mkdir()
        for card in range(gpus):
            device = folder / "gpu" / f"n{n}nvidia{card}"
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            device.chmod(0o666)
        gres_lines.append(f"NodeName={node} Name=gpu Type={model} File={folder}/gpu/n{n}nvidia[0-{gpus - 1}]")
        node_lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=64 RealMemory=256000 "
            f"Gres=gpu:{model}:{gpus} State=UNKNOWN"
        )
    _write(folder / "gres.conf", "\n".join(gres_lines) + "\n")
    _write(folder / "cgroup.conf", "CgroupPlugin=cgroup/v1\n")
    _write(
        folder / "epilog.sh",
        f'#!/bin/sh\ncd {folder}/epilog || exit 0\nif [ -e "slow-$SLURM_JOB_ID" ]; then sleep 2; fi\n'
        'n=0; while [ -e "hold-$SLURM_JOB_ID" ] && [ $n -lt 300 ]; do n=$((n + 1)); sleep 0.2; done\nexit 0\n',
        0o755,
    )
    _write(
        folder / "slurm.conf",
        f"""ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={books.socket}
CredType=cred/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={books.folder}/jwt.key
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,bf_interval=1,default_queue_depth=1000
SlurmdParameters=config_overrides
LaunchParameters=disable_send_gids
ReturnToService=2
MinJobAge=300
InactiveLimit=0
KillWait=2
Epilog={folder}/epilog.sh
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
OverTimeLimit=0
SlurmctldTimeout=10
SlurmdTimeout=60
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePass={books.socket}
AccountingStoragePort={books.dbd_port}
AccountingStorageTRES=gres/gpu,gres/gpu:a100,gres/gpu:h20
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment
"""
        + "\n".join(node_lines)
        + f"\nPartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
        f"PartitionName=short Nodes={name}1 MaxTime=60 State=UP\n"
        "PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF\n",
    )
    env = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": str(folder / "slurm.conf"), "LC_ALL": "C.UTF-8"}
    ctld = Daemon(f"slurmctld-{name}", ("slurmctld", "-D"), env, folder / "log" / "slurmctld.out")
    slurmds = {
        f"{name}{n}": Daemon(f"slurmd-{name}{n}", ("slurmd", "-D", "-N", f"{name}{n}"), env, folder / "log" / f"slurmd{n}.out")
        for n in range(1, nodes + 1)
    }
    return Slurm(name, folder, books, nodes, gpus, ctld, slurmds)


def _register(slurm: Slurm, users: Sequence[str]) -> None:
    """The cluster, the account and its users in the books, as `lines` tells an owner to."""

    def added() -> bool:
        slurm.run("sacctmgr", "-i", "add", "cluster", slurm.name, check=False)
        return slurm.name in slurm.run("sacctmgr", "-n", "-P", "list", "cluster", "format=cluster", check=False).split()

    until(added, f"slurmdbd knows {slurm.name}")
    slurm.run("sacctmgr", "-i", "add", "account", ACCOUNT, f"Cluster={slurm.name}", "Description=lent", "Organization=lent", check=False)
    for user in users:
        slurm.run(
            "sacctmgr", "-i", "add", "user", user, f"Cluster={slurm.name}", f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}", check=False
        )


def start_rest(slurm: Slurm) -> str:
    """slurmrestd, which refuses root: as the guest, tokens by JWT. Its URL."""
    port = free_port()
    slurm.rest = Daemon(
        f"slurmrestd-{slurm.name}",
        ("slurmrestd", "-a", "rest_auth/jwt", "-s", "v0.0.38,dbv0.0.38", f"127.0.0.1:{port}"),
        {**slurm.ctld.env, "SLURM_JWT": "daemon", "SLURMRESTD_SECURITY": "disable_unshare_sysv,disable_unshare_files"},
        slurm.folder / "log" / "slurmrestd.out",
        uid=pwd.getpwnam(GUEST).pw_uid,
    )
    slurm.rest.log.touch()
    slurm.rest.start()
    slurm.rest_url = f"http://127.0.0.1:{port}"

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(listens, "slurmrestd listens")
    return slurm.rest_url


@contextlib.contextmanager
def running_slurm(
    *names: str, nodes: int = 2, gpus: int = 4, users: Sequence[str] = (GUEST,), rest: bool = False
) -> Iterator[dict[str, Slurm]]:
    """Clusters of these names with common books, idle; all of it gone afterwards."""
    if why := missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="sl-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "b").mkdir()
    books = _books(folder / "b")
    clusters = {name: _cluster(name, folder / name, books, nodes, gpus) for name in names}
    # slurmdbd and sacctmgr find munge by any cluster's file.
    (folder / "b" / "slurm.conf").symlink_to(clusters[names[0]].conf)
    try:
        _start_books(books)
        for slurm in clusters.values():
            _register(slurm, users)
            slurm.ctld.start()
            until(slurm.answers, f"slurmctld of {slurm.name} answers")
            for daemon in slurm.slurmds.values():
                daemon.start()
        for slurm in clusters.values():
            until(slurm.idle, f"the nodes of {slurm.name} are idle")
            if rest:
                start_rest(slurm)
        yield clusters
    finally:
        for slurm in clusters.values():
            with contextlib.suppress(Exception):
                slurm.clear()
            for daemon in (*([slurm.rest] if slurm.rest else []), *slurm.slurmds.values(), slurm.ctld):
                daemon.end()
        for daemon in reversed(books.daemons):
            daemon.end()
        shutil.rmtree(folder, ignore_errors=True)


class Shared:
    """The world of this test process: started when the first asks, ended by the session."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._clusters: dict[str, Slurm] | None = None

    def get(self) -> dict[str, Slurm]:
        if self._clusters is None:
            self._clusters = self._stack.enter_context(running_slurm("lab", "sea", rest=True))
        return self._clusters

    def close(self) -> None:
        self._stack.close()
        self._clusters = None


SHARED = Shared()
