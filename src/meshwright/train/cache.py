"""Files that can be made again, kept under the user's cache directory.

An entry is a few files and a manifest with their checksums. Every file is written under another name and then
renamed, the manifest last, so a reader sees a whole entry or none; and because an entry's content is a function of its
key, processes that write the same one at the same time do no harm.
"""

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

Report = Callable[[str], None]
Write = Callable[[BinaryIO], None]


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/meshwright, or ~/.cache/meshwright (XDG Base Directory Specification 0.8)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    home = home if os.path.isabs(home) else tempfile.gettempdir()  # a user without a home directory
    return (Path(base) if os.path.isabs(base) else Path(home, ".cache")) / "meshwright"


@dataclass(frozen=True)
class Entry:
    """A whole entry: where its files are, by suffix, and the facts that were stored with them."""

    files: Mapping[str, Path]
    facts: Mapping[str, Any]


def load(directory: Path, key: str, report: Report) -> Entry | None:
    """The entry `key`, or None where there is none; a damaged one is reported and counts as none."""
    manifest = directory / f"{key}.manifest.json"
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        files = {suffix: directory / f"{key}{suffix}" for suffix in content["files"]}
        good = all(_checksum(files[suffix]) == checksum for suffix, checksum in content["files"].items())
        entry = Entry(files, content["facts"])
    except FileNotFoundError:
        good, entry = not manifest.exists(), None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        good, entry = False, None
    if not good:
        report(f"the cached {manifest} is damaged; it is made again")
        return None
    return entry


def store(directory: Path, key: str, files: Mapping[str, Write], facts: Mapping[str, Any]) -> Entry:
    """Write the entry `key`: `files` maps a suffix to what writes that file. Raises OSError where it cannot."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {suffix: directory / f"{key}{suffix}" for suffix in files}
    for suffix, write in files.items():
        write_whole(paths[suffix], write)
    manifest = {"files": {suffix: _checksum(path) for suffix, path in paths.items()}, "facts": dict(facts)}
    text = json.dumps(manifest, sort_keys=True).encode()
    write_whole(directory / f"{key}.manifest.json", lambda file: file.write(text))
    return Entry(paths, facts)


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Give `path` the content that `write` writes, all of it or, whatever happens, none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _checksum(path: Path) -> int:
    """CRC-32 of a file: it finds damage, not malice."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
