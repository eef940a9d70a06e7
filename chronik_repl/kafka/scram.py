"""SCRAM-SHA-256, the server's side (RFC 5802 and 7677), without sockets: two messages in, two out.

A name that nobody has goes all the way to the proof, with a salt of its own, and fails there like a wrong password.
Channel binding is not offered: a client that insists on it is refused, as the RFC asks.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets

from chronik_repl.kafka.users import Users

MESSAGE_BYTES_MAX = 4096
NONCE_BYTES = 18
FIRST = re.compile(r"(?P<gs2>[ny],(?:a=(?P<as>[^,]*))?,)n=(?P<name>[^,]+),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?:,.*)?\Z")
FINAL = re.compile(
    r"(?P<bare>c=(?P<binding>[A-Za-z0-9+/=]+),r=(?P<nonce>[^,]+)(?:,[^,]*)*?),p=(?P<proof>[A-Za-z0-9+/=]+)\Z"
)


class ScramFailed(Exception):
    """This exchange is over. The message is for our log, never for the peer."""


class Exchange:
    """One login. `name` is proven once `final` has returned."""

    def __init__(self, users: Users, nonce: str = "") -> None:
        self._users = users
        self._ours = nonce or base64.b64encode(secrets.token_bytes(NONCE_BYTES)).decode()
        self.name = ""
        self.proven = False
        self._gs2 = ""
        self._nonce = ""
        self._said = ""  # client-first-bare and server-first: what the proof is over

    @property
    def begun(self) -> bool:
        return bool(self._said)

    def first(self, message: bytes) -> bytes:
        found = FIRST.match(_text(message))
        if found is None:
            raise ScramFailed("unreadable first message, or channel binding was asked for")
        self.name = _unescape(found["name"])
        if found["as"] and _unescape(found["as"]) != self.name:
            raise ScramFailed("login on behalf of someone else")
        self._gs2 = found["gs2"]
        self._nonce = found["nonce"] + self._ours
        verifier, _ = self._users.verifier(self.name)
        answer = f"r={self._nonce},s={base64.b64encode(verifier.salt).decode()},i={verifier.iterations}"
        self._said = f"{_text(message)[len(self._gs2) :]},{answer}"
        return answer.encode()

    def final(self, message: bytes) -> bytes:
        found = FINAL.match(_text(message))
        if found is None:
            raise ScramFailed("unreadable final message")
        verifier, known = self._users.verifier(self.name)
        said = f"{self._said},{found['bare']}".encode()
        try:
            proof = base64.b64decode(found["proof"], validate=True)
            binding = base64.b64decode(found["binding"], validate=True)
        except binascii.Error as error:
            raise ScramFailed("unreadable proof") from error
        signature = hmac.digest(verifier.stored_key, said, "sha256")
        if len(proof) != len(signature):
            raise ScramFailed("unreadable proof")
        client_key = bytes(mine ^ theirs for mine, theirs in zip(proof, signature, strict=True))
        right = hmac.compare_digest(hashlib.sha256(client_key).digest(), verifier.stored_key)
        # librdkafka before 2.2 says its own part twice. The proof covers what it says: Kafka takes that, and so do we.
        same = hmac.compare_digest(found["nonce"][-len(self._nonce) :].encode(), self._nonce.encode())
        bound = hmac.compare_digest(binding, self._gs2.encode())
        if not (right & same & bound & known):
            raise ScramFailed("wrong name or password")
        self.proven = True
        return b"v=" + base64.b64encode(hmac.digest(verifier.server_key, said, "sha256"))


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise ScramFailed(f"a message of {len(message)} bytes")
    try:
        return message.decode()
    except UnicodeDecodeError as error:
        raise ScramFailed("a message that is not UTF-8") from error


def _unescape(name: str) -> str:
    if "=" in name.replace("=2C", "").replace("=3D", ""):
        raise ScramFailed("a bad escape in the name")
    return name.replace("=2C", ",").replace("=3D", "=")
