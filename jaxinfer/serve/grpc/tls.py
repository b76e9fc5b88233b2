"""TLS for grpc.aio servers, with certificates that can be replaced while the server runs.

gRPC requests the certificates at each handshake (`grpc.dynamic_ssl_server_credentials`): new connections use the
current files, existing connections keep their certificates.
"""

from __future__ import annotations

import logging
import os
import threading

import grpc

from jaxinfer.serve.settings import ServeConfig, ServeConfigError

_log = logging.getLogger("jaxinfer.serve")

# mtime, size and inode of the certificate, key and client CA, which change when a file is replaced.
_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """PEM files that are reloaded when one of them changes.

    Args:
        certificate, key: certificate chain and private key of the server.
        client_ca: CA of client certificates; clients must present one if it is set.

    Raises:
        ServeConfigError: a file cannot be read.
    """

    def __init__(self, certificate: str, key: str, client_ca: str | None = None) -> None:
        self._paths = [path for path in (certificate, key, client_ca) if path is not None]
        self._lock = threading.Lock()  # handshakes run in gRPC's own threads
        try:
            self._stamp, self._current = self._read()
        except OSError as error:
            raise ServeConfigError(f"tls: cannot read {error.filename}: {error.strerror}") from error

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._current, self.current, require_client_authentication=len(self._paths) > 2
        )

    def current(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificates in the files, or the previous ones if the files cannot be read now."""
        with self._lock:
            try:
                if self._stamps() != self._stamp:
                    self._stamp, self._current = self._read()
                    _log.info("TLS certificates were read again")
            except OSError as error:
                _log.error("TLS certificates stay as they were: %s", error)
            return self._current

    def _read(self) -> tuple[_Stamp, grpc.ServerCertificateConfiguration]:
        stamp = self._stamps()
        certificate, key, *client_ca = (_bytes(path) for path in self._paths)
        return stamp, grpc.ssl_server_certificate_configuration([(key, certificate)], *client_ca)

    def _stamps(self) -> _Stamp:
        stats = [os.stat(path) for path in self._paths]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def credentials_of(config: ServeConfig) -> grpc.ServerCredentials | None:
    """Create credentials from the server's settings; None: no TLS.

    Raises:
        ServeConfigError: a file cannot be read.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Certificates(config.tls_cert, config.tls_key, config.tls_client_ca).credentials()


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
