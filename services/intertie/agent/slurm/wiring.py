"""What `[slurm]` of site.toml says, put together: transport, commands or slurmrestd, job folders."""

from __future__ import annotations

from pathlib import Path, PurePath

from intertie.agent import accounts
from intertie.agent.adapters.files import Files, LocalFiles
from intertie.agent.slurm.cluster import SlurmCluster
from intertie.agent.slurm.commands import Commands, Slurm
from intertie.agent.slurm.core.rules import Become, SlurmRules, check
from intertie.agent.slurm.folders import WrapperFiles
from intertie.agent.slurm.restd import Restd
from intertie.agent.slurm.transport import LocalShell, Shell, SshShell, environment
from intertie.clock import Clock
from intertie.errors import Refused


def shell_of(rules: SlurmRules) -> Shell:
    return SshShell(rules.ssh, environment(rules)) if rules.ssh is not None else LocalShell(environment(rules))


def slurm_of(rules: SlurmRules, data: Path, clock: Clock) -> tuple[SlurmCluster, Files]:
    """`Refused('slurm.rules')` for what cannot be so."""
    check(rules)
    if rules.become is Become.ROOT and not accounts.is_root():
        raise Refused("slurm.rules", 'become = "root" needs an agent that is root', next_step='use "sudo" with the wrapper, or "self"')
    shell = shell_of(rules)
    files: Files
    if rules.become is Become.SUDO:
        files = WrapperFiles(shell, rules, data / "scratch")
    elif rules.ssh is not None and rules.become is Become.SELF:
        raise Refused("slurm.rules", 'by SSH job folders are made by the wrapper: set become = "sudo"')
    else:
        files = LocalFiles(Path(rules.folder), PurePath(rules.nodes_see) if rules.nodes_see else None)
    slurm: Slurm = Restd(rules, clock, files) if rules.become is Become.REST else Commands(shell, rules, clock)
    return SlurmCluster(slurm, rules, files, clock), files
