"""Documents from files: .txt, .md and .py (a file is one document), .jsonl and .parquet (a row is one).

Each may be compressed as .gz or .zst (RFC 1952, RFC 8878). The order of the documents is that of the sorted paths, so
it does not depend on the order of arguments, of a directory's entries, or on the machine.
"""

import glob
import gzip
import hashlib
import io
import json
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from meshwright.config import Refused, require

TEXT = (".txt", ".md", ".py")
ROWS = (".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst")
FORMATS = f"{', '.join(TEXT + ROWS)}, each also {' or '.join(COMPRESSED)}"

LIBRARY_BYTES = 8_000_000
"""How much of the standard library is read: enough for a demonstration, quick to tokenise."""
LIBRARY_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
"""Directories of it that are not read: other people's packages, tests, tables of character codes."""

CHUNK_BYTES = 1 << 20


# ---- which files ----------------------------------------------------------------------------------------


def find(paths: Iterable[str]) -> tuple[Path, ...]:
    """The files that `paths` (files, directories, globs) name, sorted, each once; refuses what names none.

    Directories are read recursively; there, hidden files, empty files and other formats are passed over.
    """
    return tuple(sorted({file for name in paths for file in _matches(name)}))


def _matches(name: str) -> list[Path]:
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if os.path.lexists(path) and not os.path.isdir(path):
        return [_named(path)]
    matches = [path] if os.path.isdir(path) else [Path(match) for match in glob.glob(str(path), recursive=True)]
    require(bool(matches), f"data.paths: {name!r} matches nothing (from {os.getcwd()})")
    files = [file for match in matches for file in (_in_directory(match) if os.path.isdir(match) else [match])]
    files = [file for file in files if kind_of(file) and _may_be_read(file)]
    require(bool(files), f"data.paths: {name!r} holds no file that is read; read are {FORMATS}")
    return files


def library() -> tuple[Path, ...]:
    """The Python standard library's own source files on this machine, in order of path, up to `LIBRARY_BYTES`."""
    root = Path(sysconfig.get_path("stdlib"))
    files, total_bytes = [], 0
    for path in _walk(root, lambda name: name not in LIBRARY_LEFT_OUT):
        length_bytes = path.stat().st_size if path.suffix == ".py" else 0
        if length_bytes and total_bytes + length_bytes <= LIBRARY_BYTES:
            files.append(path)
            total_bytes += length_bytes
    require(bool(files), f"this Python has no library source at {root}; set data.paths to text of your own")
    return tuple(files)


def kind_of(path: Path) -> str:
    """The format's suffix without the compression's, or "" where the format is not known."""
    suffix = Path(path.name.lower().removesuffix(compression_of(path))).suffix
    return suffix if suffix in TEXT + ROWS else ""


def compression_of(path: Path) -> str:
    """Its suffix, or "" where the file is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def _named(path: Path) -> Path:
    """`path`, which the user names itself, so that it cannot be passed over."""
    require(bool(kind_of(path)), f"data.paths: {str(path)!r} has a format that is not read; read are {FORMATS}")
    try:
        status = path.stat()
    except OSError as error:
        raise Refused(f"data file {str(path)!r} cannot be read: {error.strerror}") from None
    require(stat.S_ISREG(status.st_mode), f"data.paths: {str(path)!r} is neither a file nor a directory")
    require(status.st_size > 0, f"data file {str(path)!r} is empty")
    return path


def _in_directory(directory: Path) -> list[Path]:
    return list(_walk(directory, lambda name: not name.startswith(".")))


def _may_be_read(path: Path) -> bool:
    """Whether it is a file with content; a dangling link counts, so that reading it is refused by name."""
    return os.path.getsize(path) > 0 if os.path.isfile(path) else not os.path.exists(path)


def _walk(directory: Path, wanted: Any) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise Refused(f"data directory {error.filename!r} cannot be read: {error.strerror}")

    for root, directories, files in os.walk(directory, onerror=refuse):
        directories[:] = sorted(name for name in directories if wanted(name))
        yield from (Path(root, name) for name in sorted(files) if wanted(name))


# ---- what is in them ------------------------------------------------------------------------------------


def content_hash(files: Iterable[Path], text_field: str) -> str:
    """A hash of the files' formats and bytes, not of their names: what the documents are a function of."""
    content = hashlib.blake2b(f"{text_field}\0".encode(), digest_size=16)
    for path in files:
        one = hashlib.blake2b(digest_size=16)
        for chunk in _raw(path):
            one.update(chunk)
        content.update(f"{kind_of(path)} {compression_of(path)} {one.hexdigest()}\n".encode())
    return content.hexdigest()


def documents(files: Iterable[Path], text_field: str) -> Iterator[str]:
    """The text of every document, in order; empty ones too. Refuses what cannot be read, by file and line or row."""
    for path in files:
        kind = kind_of(path)
        if kind == ".jsonl":
            yield from _json_lines(path, text_field)
        elif kind == ".parquet":
            yield from _parquet_rows(path, text_field)
        else:
            yield _decoded(b"".join(_chunks(path)), f"data file {str(path)!r}")


def _json_lines(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        where = f"data file {str(path)!r}, line {number}"
        text = _decoded(line, where)
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{where}: not valid JSON: {error}") from None
        require(isinstance(row, dict), f"{where}: holds {_kind_word(row)}, not an object with the field {text_field!r}")
        yield _field(row, text_field, where)


def _parquet_rows(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    where = f"data file {str(path)!r}"
    try:
        source = io.BytesIO(b"".join(_chunks(path))) if compression_of(path) else str(path)
        with pyarrow.parquet.ParquetFile(source) as file:
            names = file.schema_arrow.names
            require(text_field in names, _no_field(text_field, where, names))
            kind = file.schema_arrow.field(text_field).type
            require(
                pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind),
                f"{where}: the field {text_field!r} (data.text_field) is {kind}, not a string",
            )
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                yield from ("" if text is None else text for text in batch.column(0).to_pylist())
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Refused(f"{where} is not a readable parquet file: {_first_line(error)}") from None


def _field(row: dict[str, Any], text_field: str, where: str) -> str:
    """The row's text; a null is an empty document."""
    require(text_field in row, _no_field(text_field, where, row))
    text = "" if row[text_field] is None else row[text_field]
    require(
        isinstance(text, str),
        f"{where}: the field {text_field!r} (data.text_field) is {_kind_word(text)}, not a string",
    )
    require(
        _is_unicode(text), f"{where}: the field {text_field!r} holds half of a surrogate pair, which is no character"
    )
    return text


def _no_field(text_field: str, where: str, fields: Iterable[str]) -> str:
    names = ", ".join(list(fields)[:20]) or "none"
    return (
        f"{where} has no field {text_field!r}; its fields: {names}. Set data.text_field to the one that holds the text"
    )


def _decoded(content: bytes, where: str) -> str:
    require(b"\0" not in content, f"{where} is binary, not text: it holds NUL bytes (UTF-16? Save it as UTF-8)")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(
            f"{where} is binary or not UTF-8: byte {error.start} cannot be decoded; save it as UTF-8"
        ) from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind_word(value: Any) -> str:
    words = {"dict": "an object", "list": "a list", "str": "a string", "bool": "true or false", "NoneType": "null"}
    return words.get(type(value).__name__, "a number")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---- bytes ----------------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[bytes]:
    """Lines, without their ends; never more than one chunk and one line in memory."""
    parts: list[bytes] = []
    for chunk in _chunks(path):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        for line in others:
            yield b"".join(parts)
            parts = [line]
    yield b"".join(parts)


def _chunks(path: Path) -> Iterator[bytes]:
    """The file's bytes, decompressed; refuses a broken or cut stream."""
    compression = compression_of(path)
    try:
        if compression == ".gz":
            with gzip.open(path) as file:
                yield from iter(lambda: file.read(CHUNK_BYTES), b"")
        elif compression == ".zst":
            yield from _zstandard(path)
        else:
            yield from _raw(path)
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise Refused(f"data file {str(path)!r} is not a whole {compression} file: {_first_line(error)}") from None
    except OSError as error:
        raise Refused(f"data file {str(path)!r} cannot be read: {error.strerror}") from None


def _zstandard(path: Path) -> Iterator[bytes]:
    """All frames of a .zst file. (zstandard's own reader takes a cut file for a whole one: 0.25.)"""
    frame, open_frame = zstandard.ZstdDecompressor().decompressobj(), False
    for chunk in _raw(path):
        while chunk:
            yield frame.decompress(chunk)
            open_frame, chunk = not frame.eof, frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if open_frame:
        raise EOFError("the file ends before its last frame does")


def _raw(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(CHUNK_BYTES), b"")
    except OSError as error:
        raise Refused(f"data file {str(path)!r} cannot be read: {error.strerror}") from None
