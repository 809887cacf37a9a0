"""What clients remember between rounds, on disk.

Every value is kept under (client, round), together with the one before it. A round that is trained again after a
crash therefore starts from what the client knew before that round: training is idempotent, and no commit has to span
clients and server. What is sent only once is kept in files, named by content.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path

import lmdb
from safetensors import SafetensorError

from .. import files
from ..errors import UserError
from ..params import Params, digest
from .wire import pack, unpack

DATA = "data.mdb"  # LMDB's name of its file
_KEY = struct.Struct(">QI")  # client, round: big-endian, so that LMDB's order is theirs
_MAP = 1 << 40  # an address range, not a size on disk


class Store:
    """Safetensors blobs in LMDB: constant memory for any number of clients, shared by processes.

    `readonly`: of a finished run; nothing is written, not even a lock.
    """

    def __init__(self, path: Path, readonly: bool = False) -> None:
        self.path, self._readonly = path, readonly
        options = {"readonly": True, "lock": False} if readonly else {"map_size": _MAP, "max_readers": 512}
        if not readonly:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # private to its owner, also on this machine
        try:
            self._env = lmdb.open(
                str(path), metasync=False, readahead=False, mode=0o600, create=not readonly, **options
            )
        except lmdb.Error as error:
            raise UserError(
                f'the clients\' state in "{path}" cannot be opened: {error}; if the disk is full, make room and '
                "resume the run"
            ) from None
        pages = self._env.info()["last_pgno"] + 1
        if (path / DATA).stat().st_size < pages * self._env.stat()["psize"]:  # reading it would end the process
            self._env.close()
            raise self._damaged("it was cut off")

    def get(self, client: int, as_of: int) -> Params:
        """The client's value as of the start of a round: the newest of an earlier one; empty if there is none."""
        with self._reading() as cursor:
            found = cursor.set_range(_KEY.pack(client, as_of))
            if not (cursor.prev() if found else cursor.last()) or _KEY.unpack(cursor.key())[0] != client:
                return {}
            return self._read(bytes(cursor.value()))

    def put(self, round: int, values: Mapping[int, Params]) -> None:
        """Stores the clients' values of this round, all or none."""
        self._check_writable()
        try:
            with self._env.begin(write=True) as txn:
                for client, params in values.items():
                    self._forget(txn, client, round)
                    txn.put(_KEY.pack(client, round), pack(params, {"digest": digest(params)}))
        except lmdb.Error as error:
            raise UserError(
                f'the clients\' state in "{self.path}" cannot be written: {error}; make room and resume the run, '
                "completed rounds are kept"
            ) from None

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Cursor]:
        try:
            with self._env.begin(buffers=True) as txn, txn.cursor() as cursor:
                yield cursor
        except (lmdb.Error, struct.error) as error:
            raise self._damaged(str(error)) from None

    def _read(self, blob: bytes) -> Params:
        try:
            params, note = unpack(blob)
            if note.get("digest") in (None, digest(params)):
                return params
            why = "the checksum of a value is wrong"
        except (SafetensorError, ValueError, KeyError) as error:
            why = str(error)
        raise self._damaged(why)

    def _damaged(self, why: str) -> UserError:
        return UserError(
            f'the clients\' state in "{self.path / DATA}" is damaged ({why}): put it back from a copy; '
            "the server's model can still be exported"
        )

    @classmethod
    def newest(cls, path: Path) -> int:
        """The last round of which a client has stored something; 0 if none has."""
        if not (path / DATA).exists():
            return 0
        with closing(cls(path, readonly=True)) as store, store._reading() as cursor:
            return max((_KEY.unpack(key)[1] for key in cursor.iternext(keys=True, values=False)), default=0)

    def add(self, digest: str, blob: bytes) -> None:
        """Keeps a blob that is sent only once."""
        self._check_writable()
        file = self.path / "once" / digest
        if file.exists() and file.read_bytes() == blob:  # it may be damaged
            return
        file.parent.mkdir(mode=0o700, exist_ok=True)
        files.write(file, blob, private=True)

    def once(self, digest: str) -> Params:
        file = self.path / "once" / digest
        blob = file.read_bytes() if file.exists() else b""
        if sha256(blob).hexdigest() != digest:
            raise UserError(f'"{file}" is damaged: delete it and resume the run, it is sent again')
        return unpack(blob)[0]

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
