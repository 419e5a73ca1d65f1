"""The keys that both servers ask for. Imports no jax."""

import hashlib
import hmac
from collections.abc import Sequence

from jaxserve.entry.failures import Unauthenticated


class ApiKeys:
    """Wants `Authorization: Bearer <key>` with one of the keys; without keys, nothing."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, authorization: bytes) -> None:
        """`authorization`: the header's value, empty when there is none. Raises: Unauthenticated"""
        if not self._digests:
            return
        kind, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        # All are compared, so that the time says nothing of which one it resembles.
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        if kind.lower() != b"bearer" or not any(matches):
            what = "is not valid" if key else "is missing; send Authorization: Bearer <key>"
            raise Unauthenticated(f"the API key {what}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # equal lengths: compare_digest tells lengths apart
