"""Read match files from a zip archive, a folder or a single file, with limits and never unpacked to disk.

An archive is not trusted: its directory is checked before any member is read, and what is read is checked against it.
"""

import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import UserError

_MAX_FILES = 100_000
_MAX_BYTES = 16 * 2**20  # of one match; the longest T20 takes a quarter of a megabyte
_MAX_TOTAL_BYTES = 4 * 2**30
_MAX_RATIO = 200  # of the sizes after and before decompression; match files reach 30
_SUFFIX = ".json"
_DRIVE = re.compile(r"^[A-Za-z]:")


class MatchFile(NamedTuple):
    """The content of one file."""

    name: str  # without folder and suffix: Cricsheet's name of the match
    place: str  # for error messages
    text: bytes


def read_match_files(path: str) -> Iterator[MatchFile]:
    """Yield the match files of an archive or a folder, sorted by name; other files are ignored."""
    source = Path(path).expanduser()
    try:
        if source.is_dir():
            yield from _of_folder(source, path)
        elif not source.is_file():
            is_there = source.exists()
            raise UserError(f"data.path={path}: {'not a file' if is_there else 'no such file'} (from {Path.cwd()})")
        elif source.suffix.lower() == _SUFFIX:
            yield MatchFile(source.stem, f"data.path={path}", _read_file(source, f"data.path={path}"))
        else:
            yield from _of_archive(source, path)
    except (OSError, ValueError) as error:
        raise UserError(f"data.path={path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _of_folder(folder: Path, path: str) -> Iterator[MatchFile]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == _SUFFIX and file.is_file())
    _require_files(len(files), f"data.path={path}: no {_SUFFIX} file in this folder")
    for file in files:
        place = f"data.path={path}: {file.name}"
        yield MatchFile(file.stem, place, _read_file(file, place))


def _read_file(file: Path, place: str) -> bytes:
    with file.open("rb") as opened:
        text = opened.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise UserError(f"{place}: longer than {_MAX_BYTES:,} bytes: not a match file")
    return text


def _of_archive(archive: Path, path: str) -> Iterator[MatchFile]:
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            for member in members:
                _check_member(member, _place(path, member))
            matches = sorted(
                (each for each in members if each.filename.lower().endswith(_SUFFIX)), key=lambda each: each.filename
            )
            _check_all(matches, path)
            for member in matches:
                place = _place(path, member)
                yield MatchFile(Path(member.filename).stem, place, _read_member(opened, member, place))
    except zipfile.BadZipFile as error:
        raise UserError(f"data.path={path}: not a valid zip archive: {error}") from None


def _place(path: str, member: zipfile.ZipInfo) -> str:
    name = member.orig_filename
    return f"data.path={path}: {name if name.isprintable() else ascii(name)}"  # control characters


def _check_member(member: zipfile.ZipInfo, place: str) -> None:
    """Refuse what an honest archive never contains. `orig_filename`, because zipfile makes some names look harmless."""
    for name in (member.filename, member.orig_filename):
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or _DRIVE.match(name) or ".." in parts or "\0" in name:
            raise UserError(f"{place}: the name leads out of the archive: do not trust this archive")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise UserError(f"{place}: a link: expected plain files only")


def _check_all(matches: list[zipfile.ZipInfo], path: str) -> None:
    _require_files(len(matches), f"data.path={path}: no {_SUFFIX} file in this archive")
    names: set[str] = set()
    total = 0
    for member in matches:
        place = _place(path, member)
        if member.filename in names:
            raise UserError(f"{place}: occurs twice in the archive")
        names.add(member.filename)
        if member.flag_bits & 1:
            raise UserError(f"{place}: encrypted: use an archive without a password")
        if member.file_size > _MAX_BYTES:
            raise UserError(f"{place}: {member.file_size:,} bytes when unpacked, more than {_MAX_BYTES:,}")
        if member.file_size > _MAX_RATIO * max(member.compress_size, 1):
            raise UserError(f"{place}: unpacks to more than {_MAX_RATIO} times its size: not a match file")
        total += member.file_size
    if total > _MAX_TOTAL_BYTES:
        raise UserError(f"data.path={path}: {total:,} bytes when unpacked, more than {_MAX_TOTAL_BYTES:,}")


def _require_files(count: int, if_none: str) -> None:
    if not count:
        raise UserError(if_none)
    if count > _MAX_FILES:
        raise UserError(f"{if_none.partition(': no ')[0]}: {count:,} match files, more than {_MAX_FILES:,}")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, place: str) -> bytes:
    """Read all of a member, but never more than its directory entry says."""
    try:
        with archive.open(member) as opened:
            text = opened.read(member.file_size + 1)
    except Exception as error:  # from zipfile or a decompressor
        raise UserError(f"{place}: cannot be unpacked: {error}") from None
    if len(text) != member.file_size:
        raise UserError(f"{place}: {len(text):,} bytes or more, but the archive says {member.file_size:,}")
    return text
