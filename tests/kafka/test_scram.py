"""SCRAM as the RFC has it, and that nobody learns from a failure why it failed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import os
import re
from pathlib import Path

import pytest

from chronik_repl.cli import main
from chronik_repl.errors import ConfigError
from chronik_repl.kafka.scram import Exchange, ScramFailed
from chronik_repl.kafka.users import ITERATIONS, Users, Verifier, parse, read, write

SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
USERS = Users(b"secret", {"user": Verifier.make("pencil", salt=SALT, iterations=4096)})
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="


class Client:
    """A client of our own, for the cases that no library sends. Its proof is right for what it says."""

    def __init__(self, name: str, password: str, *, header: str = "n,,") -> None:
        self.bare, self.password, self.header = f"n={name},r=abc", password, header

    def first(self) -> bytes:
        return (self.header + self.bare).encode()

    def final(self, answer: bytes, *, bound: str = "", twice: str = "", nonce: str = "") -> bytes:
        found = re.fullmatch(r"r=(.+),s=(.+),i=(\d+)", answer.decode())
        assert found
        salted = hashlib.pbkdf2_hmac("sha256", self.password.encode(), base64.b64decode(found[2]), int(found[3]))
        key = hmac.digest(salted, b"Client Key", "sha256")
        binding = base64.b64encode((bound or self.header).encode()).decode()
        said = f"c={binding},r={twice}{nonce or found[1]}"
        whole = f"{self.bare},{answer.decode()},{said}".encode()
        signature = hmac.digest(hashlib.sha256(key).digest(), whole, "sha256")
        proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
        return f"{said},p={proof}".encode()


def log_in(users: Users, name: str, password: str, *, header: str = "n,,", **final: str) -> Exchange:
    exchange, client = Exchange(users), Client(name, password, header=header)
    exchange.final(client.final(exchange.first(client.first()), **final))
    return exchange


def test_the_example_of_the_rfc() -> None:
    exchange = Exchange(USERS, nonce=NONCE)
    assert exchange.first(FIRST) == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    assert exchange.final(FINAL) == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert exchange.proven
    assert exchange.name == "user"


def test_right_and_wrong_passwords() -> None:
    assert log_in(USERS, "user", "pencil").proven
    assert log_in(USERS, "user", "pencil", header="y,,").proven
    assert log_in(USERS, "user", "pencil", twice="abc").proven  # librdkafka before 2.2
    assert log_in(USERS, "user", "pencil", header="n,a=user,").proven
    with pytest.raises(ScramFailed, match="wrong name or password"):
        log_in(USERS, "user", "Pencil")
    for wrong in ({"bound": "y,,"}, {"nonce": "abc"}):  # a man in the middle; an answer of another exchange
        with pytest.raises(ScramFailed, match="wrong name or password"):
            log_in(USERS, "user", "pencil", **wrong)


def test_a_name_that_nobody_has_looks_like_any_other() -> None:
    with pytest.raises(ScramFailed, match="wrong name or password"):
        log_in(USERS, "nobody", "pencil")
    salts = {Exchange(USERS).first(b"n,,n=nobody,r=x").split(b",")[1] for _ in range(3)}
    assert len(salts) == 1  # a salt that changed would tell
    assert Exchange(USERS).first(b"n,,n=nobody2,r=x").split(b",")[1] not in salts
    assert Exchange(USERS).first(b"n,,n=nobody,r=x").endswith(b",i=%d" % ITERATIONS)


def test_an_empty_key_is_no_key() -> None:
    """The stand-in for an unknown name is all zeros: a proof that fits those must not be enough."""
    exchange = Exchange(USERS)
    answer = exchange.first(b"n,,n=nobody,r=abc").decode()
    nonce = answer.split(",")[0][2:]
    final = f"c=biws,r={nonce}"
    signature = hmac.digest(bytes(32), f"n=nobody,r=abc,{answer},{final}".encode(), "sha256")
    for key in (bytes(32), hashlib.sha256(bytes(32)).digest()):
        proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
        with pytest.raises(ScramFailed):
            exchange.final(f"{final},p={proof}".encode())


@pytest.mark.parametrize(
    "message",
    [
        b"", b"n,,", b"p=tls-unique,,n=user,r=abc", b"n,a=other,n=user,r=abc", b"n,,m=x,n=user,r=abc", b"n,,n=,r=abc",
        b"n,,n=user", b"n,,n=us=er,r=abc", b"\xff\xfe", b"n,,n=user,r=" + b"x" * 5000,
    ],
)  # fmt: skip
def test_bad_first_messages(message: bytes) -> None:
    with pytest.raises(ScramFailed):
        Exchange(USERS).first(message)


@pytest.mark.parametrize(
    "message",
    [
        b"", b"c=biws", FINAL.replace(b"biws", b"eSws"), FINAL.replace(b"k0,", b"k1,"), FINAL[:-8], FINAL + b"=",
        FINAL.replace(b"p=dHz", b"p=dHy"), FINAL.replace(b"p=dHz", b"p=d Hz"), b"c=biws,r=x,p=" + b"A" * 3000,
    ],
)  # fmt: skip
def test_bad_final_messages(message: bytes) -> None:
    exchange = Exchange(USERS, nonce=NONCE)
    exchange.first(FIRST)
    with pytest.raises(ScramFailed):
        exchange.final(message)
    assert not exchange.proven


def test_users_add_list_remove(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "users"
    for name in ("alice", "bob"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{name}s secret\n"))
        assert main(["users", "add", name, "--file", str(file), "--password-stdin"]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert "secret" not in file.read_text()
    assert log_in(read(file), "alice", "alices secret").proven
    monkeypatch.setattr("sys.stdin", io.StringIO("new\n"))
    assert main(["users", "add", "alice", "--file", str(file), "--password-stdin"]) == 0
    assert log_in(read(file), "alice", "new").proven
    capsys.readouterr()
    assert main(["users", "list", "--file", str(file), "--json"]) == 0
    assert capsys.readouterr().out == '{"users": ["alice", "bob"]}\n'
    assert main(["users", "remove", "bob", "--file", str(file)]) == 0
    assert list(read(file).verifiers) == ["alice"]
    assert main(["users", "remove", "bob", "--file", str(file)]) != 0
    assert "chronik users list" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["users", "add", "carol", "--file", str(file), "--password-stdin"]) != 0
    assert main(["users", "add", "not a name", "--file", str(file), "--password-stdin"]) != 0


def test_a_users_file_keeps_its_mode_and_owner(tmp_path: Path) -> None:
    """Else the node's own user could not read it any more after root has added someone."""
    file = tmp_path / "users"
    write(file, USERS)
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 1234, 5678)
    before = file.stat()
    write(file, USERS)
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino, "written aside"


@pytest.mark.parametrize(
    "text",
    [
        "", "alice secret", "mock !!!", "mock c2VjcmV0\nalice SCRAM-SHA-256$10:c2FsdA==$AAAA:AAAA",
        "mock c2VjcmV0\nalice SCRAM-SHA-256$4096:c2FsdA==$AAAA:AAAA", "mock c2VjcmV0\n\xff\xfe",
    ],
)  # fmt: skip
def test_a_users_file_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="users"):
        parse(text.encode("latin-1"), "users")
