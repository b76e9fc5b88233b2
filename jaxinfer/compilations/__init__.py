"""Compilations: what is kept of them between starts, and counts of them; after READY there must be none.

JAX's own cache keeps executables (`cache`). To find one, JAX needs the program in StableHLO, and to trace and lower a
GPU's kernels takes longer than all else of a restart: so that is kept, too (`programs`), by a digest of all that it is
made from (`fingerprints`), and what was found out about executables by what they are (`findings`).
"""

from jaxinfer.compilations.cache import (
    DEFAULT_FOLDER,
    CacheUse,
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
    "compiler_options",
    "count_cache_use",
    "count_compilations",
    "digest_of",
    "found_out",
    "lower",
    "timed",
    "use_compilation_cache",
]
