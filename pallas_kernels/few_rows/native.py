"""Compilation and loading of ``few_rows.c``: XLA:CPU has no kernel language, so the system's C compiler is used.

The library is kept beside JAX's compiled programs, by a digest of all that it depends on. Without a compiler, products
are XLA's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import jax

_SOURCE = pathlib.Path(__file__).with_name("few_rows.c")
# Name of the handler in compiled programs, with a digest: no cached program, or proof, is of another version.
TARGET = f"jaxinfer_few_rows_{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]}"
_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC")
_SECONDS = 60
_CPUINFO = pathlib.Path("/proc/cpuinfo")
_OF_CPU = ("model name", "flags", "Features", "CPU implementer", "CPU part")  # lines of _CPUINFO that name a processor


def unavailable() -> str | None:
    """Return why there is no library on this machine, in one sentence; None: it is loaded."""
    return _loaded()[1]


def supports_float16() -> bool:
    """Whether the compiler has numbers of 16 bits (GCC 12)."""
    library = _loaded()[0]
    return library is not None and bool(ctypes.c_int.in_dll(library, "supports_float16").value)


@functools.cache
def has_amx(cpuinfo: pathlib.Path = _CPUINFO) -> bool:
    """Whether the processor multiplies bfloat16 matrices in registers (Intel AMX)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return False
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None, f"no C compiler ({', '.join(_COMPILERS)}) is installed"
    kept = jax.config.jax_compilation_cache_dir
    try:
        with tempfile.TemporaryDirectory() as scratch:  # a library that is loaded needs no file any more
            folder = pathlib.Path(kept) / "native" if kept and "://" not in kept else pathlib.Path(scratch)
            library = ctypes.CDLL(str(_built(compiler, folder)))
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        return None, f"{compiler} cannot compile {_SOURCE.name}: {said.strip()[:200]}"
    except OSError as error:
        return None, f"the library of {_SOURCE.name} cannot be loaded: {error}"
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.few_rows), platform="cpu")
    return library, None


def _built(compiler: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the path of the library, compiled unless an earlier start did."""
    path = folder / f"few_rows-{_digest(compiler)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{path.name}.{os.getpid()}"
    machine = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    headers = f"-I{jax.ffi.include_dir()}"
    command = (compiler, *_OPTIONS, machine, headers, "-o", str(made), str(_SOURCE))
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    os.replace(made, path)
    return path


def _digest(compiler: str) -> str:
    lines = _CPUINFO.read_text(errors="replace").splitlines() if _CPUINFO.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(_OF_CPU)} or lines)
    parts = (_SOURCE.read_text(), compiler, *_OPTIONS, jax.__version__, platform.machine(), *processor)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
