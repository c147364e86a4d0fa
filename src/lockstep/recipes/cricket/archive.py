"""Where match files come from: a zip archive, a folder or one file, read with limits and never unpacked to disk.

An archive is somebody else's: what its directory says is checked before a byte of a member is read, and what is read is
checked against that.
"""

import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import UserError

_MOST_FILES = 100_000
_MOST_BYTES = 16 * 2**20  # of one match; the longest T20 takes a quarter of a megabyte
_MOST_BYTES_IN_ALL = 4 * 2**30
_MOST_RATIO = 200  # of the sizes before and after compression; match files reach 30
_SUFFIX = ".json"
_DRIVE = re.compile(r"^[A-Za-z]:")


class MatchFile(NamedTuple):
    name: str  # without its folder and suffix: what Cricsheet calls the match
    place: str  # for messages
    text: bytes


def read_match_files(path: str) -> Iterator[MatchFile]:
    """The match files of an archive or a folder, by name; other files in it are passed over."""
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
        text = opened.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise UserError(f"{place}: longer than {_MOST_BYTES:,} bytes: that is no match file")
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
        raise UserError(f"data.path={path}: not a sound zip archive: {error}") from None


def _place(path: str, member: zipfile.ZipInfo) -> str:
    name = member.orig_filename
    return f"data.path={path}: {name if name.isprintable() else ascii(name)}"  # a terminal would obey some


def _check_member(member: zipfile.ZipInfo, place: str) -> None:
    """Refuse what an honest archive never has. `orig_filename`: zipfile itself makes some names look harmless."""
    for name in (member.filename, member.orig_filename):
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or _DRIVE.match(name) or ".." in parts or "\0" in name:
            raise UserError(f"{place}: a name that leads out of the archive: this archive is not to be trusted")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise UserError(f"{place}: a link: an archive of matches has plain files only")


def _check_all(matches: list[zipfile.ZipInfo], path: str) -> None:
    _require_files(len(matches), f"data.path={path}: no {_SUFFIX} file in this archive")
    names: set[str] = set()
    total = 0
    for member in matches:
        place = _place(path, member)
        if member.filename in names:
            raise UserError(f"{place}: twice in the archive")
        names.add(member.filename)
        if member.flag_bits & 1:
            raise UserError(f"{place}: encrypted: give an archive without a password")
        if member.file_size > _MOST_BYTES:
            raise UserError(f"{place}: {member.file_size:,} bytes when unpacked, more than {_MOST_BYTES:,}")
        if member.file_size > _MOST_RATIO * max(member.compress_size, 1):
            raise UserError(f"{place}: unpacks to more than {_MOST_RATIO} times its size: that is no match file")
        total += member.file_size
    if total > _MOST_BYTES_IN_ALL:
        raise UserError(f"data.path={path}: {total:,} bytes when unpacked, more than {_MOST_BYTES_IN_ALL:,}")


def _require_files(count: int, if_none: str) -> None:
    if not count:
        raise UserError(if_none)
    if count > _MOST_FILES:
        raise UserError(f"{if_none.partition(': no ')[0]}: {count:,} match files, more than {_MOST_FILES:,}")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, place: str) -> bytes:
    """All of it, but never more than its entry in the directory promises."""
    try:
        with archive.open(member) as opened:
            text = opened.read(member.file_size + 1)
    except Exception as error:  # of zipfile, or of whatever unpacks this kind of compression
        raise UserError(f"{place}: cannot be unpacked: {error}") from None
    if len(text) != member.file_size:
        raise UserError(f"{place}: {len(text):,} bytes or more, but the archive says {member.file_size:,}")
    return text
