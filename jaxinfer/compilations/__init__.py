"""Compilation caches that persist between starts, and counters of compilations; after READY there must be none.

JAX's own cache keeps executables (`cache`). To find one, JAX needs the program in StableHLO, and tracing and lowering
GPU kernels takes longer than the rest of a restart: so StableHLO is cached, too (`programs`), by a digest of all its
inputs (`fingerprints`), and calibration results are cached by the digest of the executables (`findings`).
"""

from jaxinfer.compilations.cache import (
    DEFAULT_FOLDER,
    CacheUse,
    compilations_during,
    count_cache_use,
    count_compilations,
    timed,
    use_compilation_cache,
)
from jaxinfer.compilations.findings import digest_of, found_out
from jaxinfer.compilations.fingerprints import Fingerprints
from jaxinfer.compilations.programs import compiler_options, lower

__all__ = [
    "DEFAULT_FOLDER",
    "CacheUse",
    "Fingerprints",
    "compilations_during",
    "compiler_options",
    "count_cache_use",
    "count_compilations",
    "digest_of",
    "found_out",
    "lower",
    "timed",
    "use_compilation_cache",
]
