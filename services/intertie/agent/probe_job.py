"""The known job itself: what it can see and measure of the device it was given, with the standard library alone, as one line of JSON.

It is copied into the job's script and runs as the job's account on any Python from 3.6 on. It needs no CUDA packages: the driver's own library is
asked directly. What it cannot measure it says it did not, and why. The shell around it tells when there is no Python at all.
"""

import ctypes
import hashlib
import json
import os
import sys
import tempfile
import time
from typing import Any

MIB = 1024 * 1024
COPY_MIB, DISK_MIB, HASH_MIB = 256, 32, 64
ROUNDS = 4
KNOWN = "2daeb1f36095b44b318410b3f4e8b5d989dcc7bb023d1426c492dab0a3053e74"
"""SHA-256 of eight MiB of zeros: a processor that computes another one is broken."""


def per_second(mib: int, seconds: float) -> int:
    return int(mib / seconds) if seconds > 0 else 0


def processor(said: Any) -> None:
    block = bytes(8 * MIB)
    if hashlib.sha256(block).hexdigest() != KNOWN:
        said["wrong"].append("the processor computes a wrong sum")
    began = time.perf_counter()
    whole = hashlib.sha256()
    for _ in range(HASH_MIB // 8):
        whole.update(block)
    said["measures"]["cpu_hash_mib_s"] = per_second(HASH_MIB, time.perf_counter() - began)


def disk(said: Any) -> None:
    block = os.urandom(MIB)
    try:
        with tempfile.TemporaryFile() as file:
            began = time.perf_counter()
            for _ in range(DISK_MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            said["measures"]["disk_write_mib_s"] = per_second(DISK_MIB, time.perf_counter() - began)
            file.seek(0)
            if file.read(MIB) != block:
                said["wrong"].append("the disk gives back other bytes than were written")
    except OSError as err:
        said["not_measured"]["disk_write_mib_s"] = str(err)


class Cuda:
    """The driver's library; every call that is refused raises with its number."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        answer = getattr(self.library, name)(*arguments)
        if answer != 0:
            raise OSError(f"{name} answers {answer}")


def device(said: Any) -> None:
    """The first device that is visible: how many there are, its name and memory, and copies on it and to it, read back and compared."""
    try:
        cuda = Cuda()
        cuda.call("cuInit", 0)
        count = ctypes.c_int()
        cuda.call("cuDeviceGetCount", ctypes.byref(count))
    except (OSError, AttributeError) as err:
        said["not_measured"]["device"] = f"no device could be asked for: {err}"
        return
    said["visible"] = count.value
    if count.value == 0:
        return
    try:
        handle, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.call("cuDeviceGet", ctypes.byref(handle), 0)
        cuda.call("cuDeviceGetName", name, 256, handle)
        cuda.call("cuDeviceTotalMem_v2", ctypes.byref(total), handle)
        said["model"] = name.value.decode("utf-8", "replace")
        said["measures"]["memory_mib"] = total.value // MIB
        copies(said, cuda, handle)
    except (OSError, AttributeError) as err:
        said["wrong"].append(f"the device refuses a call: {err}")


def copies(said: Any, cuda: Cuda, handle: Any) -> None:
    context, first, second = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    size = COPY_MIB * MIB
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    cuda.call("cuCtxSetCurrent", context)
    cuda.call("cuMemAlloc_v2", ctypes.byref(first), ctypes.c_size_t(size))
    cuda.call("cuMemAlloc_v2", ctypes.byref(second), ctypes.c_size_t(size))
    block = os.urandom(MIB) * COPY_MIB
    began = time.perf_counter()
    cuda.call("cuMemcpyHtoD_v2", first, block, ctypes.c_size_t(size))
    said["measures"]["to_device_mib_s"] = per_second(COPY_MIB, time.perf_counter() - began)
    cuda.call("cuMemcpyDtoD_v2", second, first, ctypes.c_size_t(size))
    cuda.call("cuCtxSynchronize")
    began = time.perf_counter()
    for _ in range(ROUNDS):
        cuda.call("cuMemcpyDtoD_v2", second, first, ctypes.c_size_t(size))
    cuda.call("cuCtxSynchronize")
    said["measures"]["device_copy_mib_s"] = per_second(COPY_MIB * ROUNDS, time.perf_counter() - began)
    back = ctypes.create_string_buffer(size)
    cuda.call("cuMemcpyDtoH_v2", back, second, ctypes.c_size_t(size))
    if back.raw != block:
        said["wrong"].append("the device gives back other bytes than were copied to it")


def main() -> int:
    said: Any = {"visible": None, "model": "", "measures": {}, "not_measured": {}, "wrong": []}
    processor(said)
    disk(said)
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        device(said)
    sys.stdout.write("\nINTERTIE-PROBE " + json.dumps(said) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
