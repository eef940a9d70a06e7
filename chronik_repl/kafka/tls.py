"""TLS for Kafka clients: the server's certificate, and who may connect if clients must show one too.

Where the door may be opened without TLS and users is config.py's to say. TLS 1.2 is the oldest version: there are
clients in use that know no later one.
"""

from __future__ import annotations

import ssl

from chronik_repl.config import Settings
from chronik_repl.errors import ConfigError


def client_context(settings: Settings) -> ssl.SSLContext | None:
    """None: no TLS. Raises ConfigError when a file cannot be used. Reads files: call it before the door opens."""
    if settings.kafka_tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.kafka_tls_cert, settings.kafka_tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"CHRONIK_KAFKA_TLS_CERT={settings.kafka_tls_cert}, CHRONIK_KAFKA_TLS_KEY={settings.kafka_tls_key}: "
            f"not a certificate and its key in PEM ({error}). Name two files such as `chronik certs` makes"
        ) from error
    if settings.kafka_tls_ca is not None:
        try:
            context.load_verify_locations(settings.kafka_tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"CHRONIK_KAFKA_TLS_CA={settings.kafka_tls_ca}: not certificates in PEM ({error}). "
                "Name the CA's, such as ca.pem of `chronik certs`"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
