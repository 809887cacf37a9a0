"""What clients remember between rounds, on disk.

Every value is kept under (client, round), together with the one before it. A round that is trained again after a
crash therefore starts from what the client knew before that round: training is idempotent, and no commit has to span
clients and server. What is sent only once is kept in files, named by content.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

import lmdb

from .. import files
from ..errors import UserError
from ..params import Params
from .wire import pack, unpack

_KEY = struct.Struct(">QI")  # client, round: big-endian, so that LMDB's order is theirs
_MAP = 1 << 40  # an address range, not a size on disk


class Store:
    """Safetensors blobs in LMDB: constant memory for any number of clients, shared by processes.

    `readonly`: of a finished run; nothing is written, not even a lock.
    """

    def __init__(self, path: Path, readonly: bool = False) -> None:
        self._path, self._readonly = path, readonly
        options = {"readonly": True, "lock": False} if readonly else {"map_size": _MAP, "max_readers": 512}
        if not readonly:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # private to its owner, also on this machine
        try:
            self._env = lmdb.open(
                str(path), metasync=False, readahead=False, mode=0o600, create=not readonly, **options
            )
        except lmdb.Error as error:
            raise UserError(f'the clients\' state in "{path}" cannot be opened: {error}') from None

    def get(self, client: int, as_of: int) -> Params:
        """The client's value as of the start of a round: the newest of an earlier one; empty if there is none."""
        with self._env.begin(buffers=True) as txn, txn.cursor() as cursor:
            found = cursor.set_range(_KEY.pack(client, as_of))
            if not (cursor.prev() if found else cursor.last()) or _KEY.unpack(cursor.key())[0] != client:
                return {}
            return unpack(bytes(cursor.value()))[0]

    def put(self, round: int, values: Mapping[int, Params]) -> None:
        """Stores the clients' values of this round, all or none."""
        self._check_writable()
        try:
            with self._env.begin(write=True) as txn:
                for client, params in values.items():
                    self._forget(txn, client, round)
                    txn.put(_KEY.pack(client, round), pack(params))
        except lmdb.Error as error:
            raise UserError(
                f'the clients\' state in "{self._path}" cannot be written: {error}; make room and resume the run, '
                "completed rounds are kept"
            ) from None

    def add(self, digest: str, blob: bytes) -> None:
        """Keeps a blob that is sent only once."""
        self._check_writable()
        file = self._path / "once" / digest
        if file.exists() and file.stat().st_size == len(blob):  # shorter after a power failure
            return
        file.parent.mkdir(mode=0o700, exist_ok=True)
        files.write(file, blob, private=True)

    def once(self, digest: str) -> Params:
        return unpack((self._path / "once" / digest).read_bytes())[0]

    def _check_writable(self) -> None:
        if self._readonly:
            raise TypeError("the clients' state of a finished run is only read")

    def _forget(self, txn: lmdb.Transaction, client: int, round: int) -> None:
        """Drops all but the newest value from before this round."""
        rounds = []
        with txn.cursor() as cursor:
            more = cursor.set_range(_KEY.pack(client, 0))
            while more and _KEY.unpack(cursor.key())[0] == client:
                rounds.append(_KEY.unpack(cursor.key())[1])
                more = cursor.next()
        kept = max((r for r in rounds if r < round), default=None)
        for r in rounds:
            if r != kept:
                txn.delete(_KEY.pack(client, r))

    def __len__(self) -> int:
        return int(self._env.stat()["entries"])

    def close(self) -> None:
        self._env.close()
