"""TLS context whose certificate files can be replaced while the server runs."""

from __future__ import annotations

import logging
import os
import ssl
from typing import Any

from jaxinfer.serve.settings import ServeConfig, ServeConfigError

_log = logging.getLogger("jaxinfer.serve")


class ReloadingContext(ssl.SSLContext):
    """Server TLS context that creates each connection with the most recently loaded certificates.

    Args:
        config: ``tls_cert``, ``tls_key`` and, for required client certificates, ``tls_client_ca``.

    Raises:
        ServeConfigError: the files cannot be used.
    """

    def __new__(cls, config: ServeConfig) -> ReloadingContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._seen = self._stamps()
        self._current = self._read()

    def reload(self) -> bool:
        """Reload the files if they changed. Files that cannot be used are logged, and the previous certificate stays in
        use."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._current = self._read()
        except ServeConfigError as error:
            _log.error("%s; the former certificate stays in use", error)
            return False
        _log.info("read the TLS files again")
        return True

    def wrap_bio(self, *args: Any, **settings: Any) -> ssl.SSLObject:
        return self._current.wrap_bio(*args, **settings)

    def _read(self) -> ssl.SSLContext:
        config = self._config
        assert config.tls_cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
            if config.tls_client_ca is not None:
                context.load_verify_locations(config.tls_client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as cause:  # covers ssl.SSLError
            names = ", ".join(file for file in self._files())
            raise ServeConfigError(f"tls_cert={config.tls_cert!r}: {names} cannot be used: {cause}") from cause
        return context

    def _files(self) -> list[str]:
        named = (self._config.tls_cert, self._config.tls_key, self._config.tls_client_ca)
        return [name for name in named if name is not None]

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(name) for name in self._files()]


def _stamp(name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
