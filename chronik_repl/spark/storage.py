"""Where a copy's files are. Local paths are read by Python itself, in the tasks; any other file system through Spark's.

A local path is a plain one or `file://…`. Everything else (hdfs://, s3a://, abfss://, viewfs://, …) is listed by the
driver's Hadoop client and reaches the tasks through `SparkContext.binaryFiles`, so that what Spark can read, this can
read, with Spark's own credentials and settings. A file may be gone when it is opened: retention removes segments while
we read, and that is the caller's to judge, so it is an answer here (`None`) and not an error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlparse

from chronik_repl.errors import ChronikError

IS_IT_RIGHT = "Is the path right, and may Spark's user read it?"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class StorageError(ChronikError):
    """A copy cannot be listed or read: names the path and the reason."""


class Entry(NamedTuple):
    name: str
    path: str
    size: int
    modified_ns: int


class Bytes(Protocol):
    """An open file."""

    size: int

    def read(self, at: int, size: int) -> bytes:
        """Fewer bytes only at the end of the file."""

    def readinto(self, view: memoryview, at: int) -> int: ...

    def close(self) -> None: ...


def is_local(path: str) -> bool:
    return path.startswith("file:/") or not _SCHEME.match(path)


def local_path(path: str) -> str:
    return unquote(urlparse(path).path) if path.startswith("file:/") else path


class LocalFile:
    """Read with pread, never mapped: a node may truncate a file that we look at, and a map would kill the process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(local_path(path), os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        while data and len(data) < size:
            more = os.pread(self._fd, size - len(data), at + len(data))
            if not more:
                break
            data += more
        return data

    def readinto(self, view: memoryview, at: int) -> int:
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], at + done)
            if got == 0:
                break
            done += got
        return done

    def close(self) -> None:
        os.close(self._fd)


class Content:
    """A file that Spark has read for us."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._data[at : at + size])

    def readinto(self, view: memoryview, at: int) -> int:
        piece = self._data[at : at + len(view)]
        view[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._data.release()


def open_local(path: str) -> LocalFile | None:
    """None if it is not there (any more)."""
    try:
        return LocalFile(path)
    except FileNotFoundError:
        return None


class Local:
    """The machine's own files."""

    def list(self, folder: str) -> list[Entry] | None:
        """None for a folder that is not there."""
        entries = []
        try:
            with os.scandir(local_path(folder)) as found:
                for entry in found:
                    try:
                        stat = entry.stat()
                    except FileNotFoundError:
                        continue
                    entries.append(Entry(entry.name, entry.path, stat.st_size, stat.st_mtime_ns))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}. Run the check as a user who may read it") from error
        return entries

    def read(self, path: str, at: int, size: int) -> bytes | None:
        try:
            file = open_local(path)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}. Run the check as a user who may read it") from error
        if file is None:
            return None
        try:
            return file.read(at, size)
        finally:
            file.close()


class Hadoop:
    """Whatever Spark's own file systems reach, from the driver."""

    def __init__(self, spark_context: Any) -> None:
        self._jvm = spark_context._jvm
        self._conf = spark_context._jsc.hadoopConfiguration()

    def _open(self, path: str) -> tuple[Any, Any]:
        where = self._jvm.org.apache.hadoop.fs.Path(path)
        return where.getFileSystem(self._conf), where

    def list(self, folder: str) -> list[Entry] | None:
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

        try:
            system, where = self._open(folder)
            if not system.exists(where):
                return None
            return [
                Entry(s.getPath().getName(), s.getPath().toString(), s.getLen(), s.getModificationTime() * 1_000_000)
                for s in system.listStatus(where)
            ]
        except Py4JJavaError as error:
            raise StorageError(f"{folder}: {error.java_exception.toString()}. {IS_IT_RIGHT}") from error

    def read(self, path: str, at: int, size: int) -> bytes | None:
        from py4j.protocol import Py4JJavaError

        try:
            system, where = self._open(path)
            stream = system.open(where)
            try:
                if at:
                    self._skip(stream, at)
                return bytes(
                    self._jvm.org.apache.commons.io.IOUtils.toByteArray(
                        self._jvm.org.apache.commons.io.input.BoundedInputStream(stream, size)
                    )
                )
            finally:
                stream.close()
        except Py4JJavaError as error:
            if "FileNotFound" in error.java_exception.getClass().getName():
                return None
            raise StorageError(f"{path}: {error.java_exception.toString()}. {IS_IT_RIGHT}") from error

    def _skip(self, stream: Any, count: int) -> None:
        from py4j.protocol import Py4JJavaError

        try:
            stream.seek(count)
        except Py4JJavaError:  # ftp:// cannot: read over it
            self._jvm.org.apache.commons.io.IOUtils.skip(stream, count)


class ArrowFile:
    """A file that pyarrow reads, for tasks of the data source, which have no JVM to ask."""

    def __init__(self, path: str) -> None:
        system, inner = _arrow(path)
        self._file = system.open_input_file(inner)
        self.size = self._file.size()

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._file.read_at(min(size, max(0, self.size - at)), at)) if at < self.size else b""

    def readinto(self, view: memoryview, at: int) -> int:
        piece = self.read(at, len(view))
        view[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._file.close()


def _arrow(path: str) -> tuple[Any, str]:
    from pyarrow import fs

    scheme, _, rest = path.partition("://")
    system, inner = fs.FileSystem.from_uri(f"{'s3' if scheme in ('s3a', 's3n') else scheme}://{rest}")
    return system, inner


class Arrow:
    """What pyarrow reads."""

    def list(self, folder: str) -> list[Entry] | None:
        from pyarrow import fs

        system, inner = _arrow(folder)
        try:
            found = system.get_file_info(fs.FileSelector(inner))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{folder}: {error}. {IS_IT_RIGHT}") from error
        base = folder.rstrip("/")
        return [Entry(f.base_name, f"{base}/{f.base_name}", f.size or 0, f.mtime_ns or 0) for f in found if f.is_file]

    def read(self, path: str, at: int, size: int) -> bytes | None:
        try:
            file = ArrowFile(path)
        except FileNotFoundError:
            return None
        try:
            return file.read(at, size)
        finally:
            file.close()


Storage = Local | Hadoop | Arrow


def storage_of(path: str) -> Local | Arrow:
    """For those who have no JVM."""
    return Local() if is_local(path) else Arrow()


def open_file(path: str) -> Bytes | None:
    """None if it is not there (any more)."""
    if is_local(path):
        return open_local(path)
    try:
        return ArrowFile(path)
    except FileNotFoundError:
        return None


def segments_folder(storage: Storage, path: str, folder: str) -> list[Entry] | None:
    """The listing of a data directory's log: of its `folder`, or of itself if the files stand in it directly."""
    inner = storage.list(os.path.join(path, folder) if is_local(path) else f"{path.rstrip('/')}/{folder}")
    return inner if inner is not None else storage.list(path)


def absolute(path: str) -> str:
    """Tasks run elsewhere than the driver: a relative path would mean something else there."""
    return str(Path(local_path(path)).absolute()) if is_local(path) else path
