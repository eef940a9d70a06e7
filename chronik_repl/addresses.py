"""Addresses as people write them: "host:port", with IPv6 hosts in brackets: "[::1]:9092"."""

from __future__ import annotations

import ipaddress


def split_address(text: str) -> tuple[str, int]:
    """The host (without brackets) and the port. Raises ValueError with a message for people."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'"{text}" is not host:port')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f'"{text}": an IPv6 host stands in brackets, as in [::1]:9092')
    if not host or any(character.isspace() or character in "/,[]" for character in host):
        raise ValueError(f'"{text}" is not host:port')
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True only where it is certain: a name that is not "localhost" may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """0.0.0.0 and :: are good to bind to, and of no use to a client."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
