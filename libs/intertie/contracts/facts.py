"""What a site tells of the place where jobs run there: modules, images, partitions, folders. It says what of a script is there before money is spent."""

from __future__ import annotations

from intertie.contracts.base import Contract, Instant


class SiteFacts(Contract, frozen=True, kw_only=True):
    """Of each kind either all that a site has, or None: it has not said. None is never read as "there is none"."""

    as_of: Instant | None = None
    modules: list[str] | None = None
    """Names as `module load` takes them, with or without a version: `cuda`, `cuda/12.4`."""
    images: list[str] | None = None
    """Container images by reference or by path."""
    partitions: list[str] | None = None
    accounts: list[str] | None = None
    """Of the site's own scheduler. The mapped one is used, whatever a script names."""
    folders: list[str] | None = None
    """Absolute folders that a mapped account may read; what lies below is there."""
    environments: list[str] | None = None
    """Conda environments and the like, by name."""
    commands: list[str] | None = None
    """What of the commands that not every site has can be called: `srun`, `module`, `conda`, `apptainer`, `mpirun` …"""
    mpi: list[str] | None = None
    """Values that `srun --mpi` takes."""
