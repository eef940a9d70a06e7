"""Who may use the Kafka door: a file of salted keys, and `chronik users add|list|remove` to keep it.

    mock <salt secret>
    alice SCRAM-SHA-256$16384:<salt>$<stored key>:<server key>

A line a user, the keys written as PostgreSQL writes them, base64. No password stands in it: from the stored key nobody
can log in, and every guess costs all the iterations. The first line's secret makes salts for users that do not exist,
always the same for the same name, so that nobody can tell them from those that do.

The file is written aside and renamed. A new one has mode 0600; one that is there keeps its mode and owner, so that root
can keep a file that the node's user reads. A running server reads it again when it has changed.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import getpass
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
from pathlib import Path

import msgspec

from chronik_repl.errors import ConfigError, Refused

MECHANISM = "SCRAM-SHA-256"
ITERATIONS = 16_384
ITERATIONS_MIN, ITERATIONS_MAX = 4_096, 1_000_000  # less than 4096 is refused by Java's client
SALT_BYTES = 16
NAME = re.compile(r"[A-Za-z0-9._@+-]{1,128}\Z")
VERIFIER = re.compile(r"SCRAM-SHA-256\$([0-9]{1,7}):([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+):([A-Za-z0-9+/=]+)\Z")
EXAMPLES = """examples:
  chronik users add alice --file users            asks for the password
  echo secret | chronik users add bob --file users --password-stdin
  chronik users list --file users --json
  chronik users remove bob --file users"""
FILE_BYTES_MAX = 16 * 1024 * 1024


class Verifier(msgspec.Struct, frozen=True):
    """What the server keeps of a password (RFC 5802)."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def make(cls, password: str, *, salt: bytes | None = None, iterations: int = ITERATIONS) -> Verifier:
        salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        return cls(iterations, salt, hashlib.sha256(client_key).digest(), hmac.digest(salted, b"Server Key", "sha256"))


class Users(msgspec.Struct, frozen=True):
    """The file's content."""

    secret: bytes
    verifiers: dict[str, Verifier]

    def verifier(self, name: str) -> tuple[Verifier, bool]:
        """What to go on with, and whether it can ever succeed: an unknown name gets one that looks like any other."""
        known = self.verifiers.get(name)
        if known is not None:
            return known, True
        salt = hmac.digest(self.secret, name.encode(), "sha256")[:SALT_BYTES]
        return Verifier(ITERATIONS, salt, bytes(32), bytes(32)), False


def read(path: Path) -> Users:
    """Raises ConfigError with the line that is wrong."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"CHRONIK_KAFKA_USERS_FILE={path}: {error.strerror}. `chronik users add NAME --file {path}` makes the file"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"CHRONIK_KAFKA_USERS_FILE={path}: {error.strerror}. Give a file that this user can read"
        ) from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(
            f"CHRONIK_KAFKA_USERS_FILE={path}: over {FILE_BYTES_MAX} bytes. Give the one that `chronik users` keeps"
        )
    return parse(raw, str(path))


def parse(raw: bytes, where: str) -> Users:
    secret = b""
    verifiers: dict[str, Verifier] = {}
    for number, line in enumerate(raw.decode("ascii", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition(" ")
        try:
            if name == "mock" and not rest.startswith(MECHANISM):
                secret = base64.b64decode(rest, validate=True)
                continue
            found = VERIFIER.match(rest.strip())
            if not NAME.match(name) or found is None or name in verifiers:
                raise ValueError
            salt, stored_key, server_key = (base64.b64decode(part, validate=True) for part in found.groups()[1:])
            iterations = int(found[1])
            if not salt or len(stored_key) != 32 or len(server_key) != 32:
                raise ValueError
            if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
                raise ValueError
        except (ValueError, binascii.Error) as error:
            raise ConfigError(
                f"{where}, line {number}: not a user with salted keys; `chronik users add` writes them"
            ) from error
        verifiers[name] = Verifier(iterations, salt, stored_key, server_key)
    if not secret:
        raise ConfigError(f"{where}: the line that starts with mock is missing; `chronik users add` makes the file")
    return Users(secret, verifiers)


def write(path: Path, users: Users) -> None:
    lines = ["# Users of the Kafka door. Kept by `chronik users`.", f"mock {_base64(users.secret)}"]
    lines += [
        f"{name} {MECHANISM}${v.iterations}:{_base64(v.salt)}${_base64(v.stored_key)}:{_base64(v.server_key)}"
        for name, v in sorted(users.verifiers.items())
    ]
    aside = path.with_name(path.name + ".new")
    try:
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write("\n".join(lines) + "\n")
            if path.exists():
                before = path.stat()
                with contextlib.suppress(PermissionError):  # it was another's
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, before.st_mode & 0o777)
        aside.replace(path)
    except OSError as error:
        raise Refused(
            f"{path} cannot be written: {error.strerror}. Name a file in a directory with room that this user may "
            "write to; nothing was changed"
        ) from error


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# ── chronik users ────────────────────────────────────────────────────────────────────────────────────────────────


def register(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = subcommands.add_parser(
        "users",
        help="who may use the Kafka door",
        description="Keep the file of users that CHRONIK_KAFKA_USERS_FILE names. A running server sees changes.",
        epilog=EXAMPLES,
        formatter_class=style,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser(
        "add", help="add a user, or give one a new password", epilog=EXAMPLES, formatter_class=style
    )
    add.add_argument("name", help="letters, digits and . _ @ + -, 128 at most")
    add.add_argument("--password-stdin", action="store_true", help="read the password from the first line of stdin")
    add.set_defaults(run=_add)
    show = actions.add_parser("list", help="show the users", epilog=EXAMPLES, formatter_class=style)
    show.add_argument("--json", action="store_true", help="the names as one object")
    show.set_defaults(run=_list)
    remove = actions.add_parser(
        "remove", help="remove a user; connections that are open stay open", epilog=EXAMPLES, formatter_class=style
    )
    remove.add_argument("name", help="as `chronik users list` shows it")
    remove.set_defaults(run=_remove)
    for action in (add, show, remove):
        action.add_argument(
            "--file",
            type=Path,
            default=os.environ.get("CHRONIK_KAFKA_USERS_FILE") or None,
            help="the users file (default: CHRONIK_KAFKA_USERS_FILE)",
        )


def _file(arguments: argparse.Namespace) -> Path:
    if arguments.file is None:
        raise Refused("which file? Give --file, or set CHRONIK_KAFKA_USERS_FILE")
    return Path(arguments.file)


def _add(arguments: argparse.Namespace) -> int:
    path = _file(arguments)
    if not path.absolute().parent.is_dir():
        raise Refused(f"{path.parent} is not a directory: make it first, or name a file elsewhere; nothing was changed")
    if not NAME.match(arguments.name):
        raise Refused(f"{arguments.name!r}: a user's name has letters, digits and . _ @ + -, 128 at most")
    users = read(path) if path.exists() else Users(secrets.token_bytes(32), {})
    password = sys.stdin.readline().rstrip("\r\n") if arguments.password_stdin else _ask()
    try:
        password.encode()
    except UnicodeEncodeError:
        raise Refused("the password is not text in UTF-8; nothing was changed") from None
    if not password:
        raise Refused("an empty password lets everyone in; nothing was changed")
    known = arguments.name in users.verifiers
    write(path, Users(users.secret, {**users.verifiers, arguments.name: Verifier.make(password)}))
    print(f"{arguments.name} {'has a new password' if known else 'was added'} in {path}")
    return 0


def _ask() -> str:
    if not sys.stdin.isatty():
        raise Refused("there is no terminal to ask for the password on; give it with --password-stdin")
    password = getpass.getpass("Password: ")
    if password != getpass.getpass("Again: "):
        raise Refused("the two passwords differ; nothing was changed")
    return password


def _list(arguments: argparse.Namespace) -> int:
    users = read(_file(arguments))
    if arguments.json:
        print(json.dumps({"users": sorted(users.verifiers)}))
    else:
        for name in sorted(users.verifiers):
            print(name)
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    path = _file(arguments)
    users = read(path)
    if arguments.name not in users.verifiers:
        raise Refused(f"there is no user {arguments.name} in {path}; `chronik users list` shows those who are")
    write(path, Users(users.secret, {name: v for name, v in users.verifiers.items() if name != arguments.name}))
    print(f"{arguments.name} was removed from {path}")
    return 0
