"""Fetching a data set from its official source: resumed downloads, checksums, safe extraction, atomic placing."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from auto_research.data.catalogue import DatasetEntry, cached_path, sha256
from auto_research.data.rows import DAMAGED
from auto_research.runtime.cache import CACHE_VARIABLE
from auto_research.runtime.errors import UserError

if TYPE_CHECKING:
    import requests
    from rich.progress import Progress

OFFLINE_VARIABLES = ("AUTO_RESEARCH_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
CHUNK = 1 << 16
NETWORK_CHUNK = 1 << 13
"""Bytes taken from the network at a time: less than that is lost when a connection is cut."""
BROKEN_ARCHIVE: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    tarfile.TarError,
    RuntimeError,  # encrypted, or a compression this Python does not know
    ValueError,
    *DAMAGED,
)
MAX_EXTRACTED = 4 << 30
"""Bytes that an archive may unpack to: far above every data set of the catalogue, far below a bomb."""


def is_offline() -> bool:
    """Whether the environment rules out network access (one of `OFFLINE_VARIABLES` is set and not 0 or false)."""
    return any(os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off") for name in OFFLINE_VARIABLES)


def fetch(
    entry: DatasetEntry,
    *,
    target: Path | None = None,
    progress: Progress | None = None,
    retries: int = 4,
    pause: float = 0.5,
) -> Path:
    """Make the published files of a data set ready in `target` (by default its folder in the cache); return it.

    Nothing is fetched if they are there and their checksums are right. Otherwise everything is downloaded beside
    `target`, verified, extracted, parsed once by the data set's reader, and only then moved into place; what a
    cut connection or a killed process left is resumed by the next call. Another process that prepares the same
    data set meanwhile is waited for.

    `retries` attempts without a new byte end a download; the n-th pause between them lasts `pause * 2**n` seconds.
    Raises UserError: offline, no answer, wrong checksum, unsafe archive, files not as published, no space.
    """
    from filelock import FileLock

    target = cached_path(entry) if target is None else target
    work = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if target.is_dir() and not entry.differing(target):
                return target
            if is_offline():
                raise UserError(
                    f"{entry.name} is not complete in {target} and the environment says offline: unset "
                    f"{' and '.join(OFFLINE_VARIABLES)}, or copy its files there."
                )
            download = Downloader(retries=retries, pause=pause, progress=progress)
            ready = work / "ready"
            shutil.rmtree(ready, ignore_errors=True)  # unlike partial downloads, of no use to us
            ready.mkdir(parents=True)
            _gather(entry, download, work, ready)
            _check(entry, ready)
            _write_source(entry, ready)
            _replace(ready, target)
            shutil.rmtree(work)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR):
            raise
        raise UserError(
            f"cannot write {target} ({error.strerror}): free some space, or set {CACHE_VARIABLE} to another folder."
        ) from error
    return target


def _gather(entry: DatasetEntry, download: Downloader, work: Path, ready: Path) -> None:
    """Put the files of the data set into `ready`."""
    if entry.archive is not None:
        packed = download((entry.archive.url,), work / "archive", (entry.archive.sha256,))
        unpacked = work / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        extract(packed, unpacked)
        for file in entry.files:
            member = unpacked / entry.archive.root / file.name
            if member.is_file():
                member.replace(ready / file.name)
            elif not file.optional:
                raise UserError(
                    f"{entry.archive.url} holds no {entry.archive.root}/{file.name}: it is another edition."
                )
        return
    for file in entry.files:
        if file.urls:
            download(file.urls, work / file.name, file.sha256).replace(ready / file.name)


def _check(entry: DatasetEntry, folder: Path) -> None:
    """Refuse files whose checksums or counts are not the published ones, or which the reader refuses."""
    differing = entry.differing(folder)
    if differing:
        raise UserError(
            f"{', '.join(differing)} of {entry.name} from {entry.source} does not have the SHA-256 that the "
            "catalogue knows: the source has changed or the transfer was damaged; nothing was kept."
        )
    loaded = entry.read(folder)
    for what, count in entry.counts.items():
        if (found := _count(loaded, what)) != count:
            raise UserError(f"{entry.name} from {entry.source} has {found} {what}, not {count}: nothing was kept.")


def _count(loaded: Any, what: str) -> int:
    """Users, items or events of Interactions; rows of a split otherwise."""
    if what in ("users", "items"):
        return int(getattr(loaded, f"num_{what}"))
    return len(loaded) if what == "events" else len(loaded[what])


def _write_source(entry: DatasetEntry, folder: Path) -> None:
    files = {file.name: sha256(folder / file.name) for file in entry.files if (folder / file.name).is_file()}
    source = {"name": entry.name, "source": entry.source, "licence": entry.licence, "sha256": files}
    (folder / "SOURCE.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def _replace(ready: Path, target: Path) -> None:
    """Give `ready` the name `target`; an incomplete folder of that name makes way."""
    if target.exists():
        old = ready.with_name("old")
        shutil.rmtree(old, ignore_errors=True)
        target.replace(old)
    ready.replace(target)


@dataclass
class Downloader:
    """Downloads over HTTP(S) with pooch, which checks the sum, and resumes what was cut off.

    Bytes arrive in `<file>.download`, which outlives the process; `<file>.download.tag` holds the server's name for
    that very content, so that a changed file is never glued to an old beginning.
    """

    retries: int = 4
    pause: float = 0.5
    progress: Progress | None = None

    def __call__(self, urls: tuple[str, ...], target: Path, known: tuple[str | None, ...]) -> Path:
        """Fetch the first of `urls` that serves a content of `known` SHA-256 (any, if none is known) as `target`."""
        sums = [digest for digest in known if digest]
        if target.is_file() and sums and sha256(target) in sums:
            return target
        failures = []
        for url in urls:
            resumed = _partial(target).is_file()
            try:
                self._retrieve(url, target)
                if resumed and sums and sha256(target) not in sums:
                    self._retrieve(url, target)  # the beginning may have been of another edition: once from its start
            except UserError as error:
                failures.append(str(error))
                continue
            if not sums or sha256(target) in sums:
                return target
            target.unlink()
            failures.append(
                f"{url} does not serve the file that the catalogue knows (its SHA-256 differs); nothing was kept, "
                "fetch again or report the change"
            )
        raise UserError("; and ".join(failures) + ".")

    def _retrieve(self, url: str, target: Path) -> None:
        import pooch

        pooch.get_logger().setLevel(logging.WARNING)
        partial = _partial(target)
        target.unlink(missing_ok=True)

        def resume(address: str, output: str, _: Any) -> None:
            self._receive(address, partial)
            os.replace(partial, output)
            _tag(partial).unlink(missing_ok=True)

        # The sum is checked by us, since a file may have several.
        pooch.retrieve(url, known_hash=None, fname=target.name, path=target.parent, downloader=resume)

    def _receive(self, url: str, partial: Path) -> None:
        """Fill `partial` with all bytes of `url`, continuing after every cut for as long as bytes arrive."""
        import requests

        idle = 0
        most = _length(partial)  # a server without ranges starts again each time: only more than ever before counts
        with _bar(self.progress, url.rsplit("/", 1)[-1]) as report:
            while True:
                try:
                    if self._attempt(url, partial, report):
                        return
                    reason = "the connection was cut"
                except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
                    reason = type(error).__name__
                except requests.RequestException as error:
                    raise UserError(f"{url} cannot be fetched ({error})") from error
                idle = 0 if _length(partial) > most else idle + 1
                most = max(most, _length(partial))
                if idle >= self.retries:
                    raise UserError(
                        f"{url} cannot be fetched ({reason}, {self.retries} attempts without a new byte); check the "
                        "network and run the same command again, it continues where it stopped"
                    )
                time.sleep(self.pause * 2**idle if idle else 0)

    def _attempt(self, url: str, partial: Path, report: Callable[[int, int | None], None]) -> bool:
        """One request for what is still missing; True when the file is whole, False when the connection was cut."""
        import requests

        have = _length(partial)
        tag = _tag(partial)
        headers = {"Accept-Encoding": "identity"}  # ranges count bytes of the file itself
        if have:
            headers["Range"] = f"bytes={have}-"
            if tag.is_file():
                headers["If-Range"] = tag.read_text(encoding="utf-8")
        with requests.get(url, headers=headers, stream=True, timeout=(10, 60)) as answer:
            if answer.status_code == 416:  # the partial file is longer than the file of today, or just as long
                whole = _total(answer) == have and have > 0
                if not whole:
                    partial.unlink(missing_ok=True)
                return whole
            if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
                raise requests.ConnectionError(f"status {answer.status_code}")
            if answer.status_code not in (200, 206):
                raise UserError(
                    f"{url} answered {answer.status_code} {answer.reason}; see the source for a new address"
                )
            continued = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(
                f"bytes {have}-"
            )
            if answer.status_code == 206 and not continued:
                partial.unlink(missing_ok=True)  # not the range asked for: start again
                return False
            if continued:
                total = _total(answer)
            elif answer.headers.get("Content-Encoding", "identity") == "identity":
                total = _content_length(answer)
            else:  # encoded against our wish: the length is not that of the file
                total = None
            validator = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            tag.unlink(missing_ok=True)
            if validator and not validator.startswith("W/"):
                tag.write_text(validator, encoding="utf-8")
            with partial.open("ab" if continued else "wb") as stream:
                report(have if continued else 0, total)
                for chunk in answer.iter_content(NETWORK_CHUNK):
                    stream.write(chunk)
                    report(stream.tell(), total)
        return total is None or _length(partial) == total


def _length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".download")


def _tag(partial: Path) -> Path:
    return partial.with_name(partial.name + ".tag")


def _content_length(answer: requests.Response) -> int | None:
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _total(answer: requests.Response) -> int | None:
    """The size of the whole file, from `Content-Range: bytes 5-9/10` or `bytes */10`."""
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


@contextmanager
def _bar(progress: Progress | None, label: str) -> Iterator[Callable[[int, int | None], None]]:
    """A function that shows (bytes so far, bytes in all) of one download."""
    if progress is None:
        yield lambda done, total: None
        return
    task = progress.add_task(label, total=None)
    yield lambda done, total: progress.update(task, completed=done, total=total)


def extract(archive: Path, folder: Path, max_bytes: int = MAX_EXTRACTED) -> None:
    """Unpack a zip or tar archive into `folder`, which must not exist; all of it or nothing.

    Refused with a UserError, before anything is written: a member with an absolute path or `..`, a link or a
    device, two members of one name, more than `max_bytes` in all. A member longer than it declares, damaged,
    encrypted, or of a name that cannot be placed ends the extraction, and `folder` is removed.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                _unpack(archive, folder, max_bytes, list(_zip_members(archive, packed)))
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as bundle:
                _unpack(archive, folder, max_bytes, list(_tar_members(archive, bundle)))
        else:
            raise UserError(f"{archive} is neither a zip nor a tar archive: fetch it again.")
    except BROKEN_ARCHIVE as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{archive} is damaged or encrypted ({error}): fetch it again.") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _Member:
    """A regular file of an archive: its checked path, the size it declares, and how to open it."""

    path: PurePosixPath
    size: int
    open: Callable[[], IO[bytes]]


def _zip_members(archive: Path, packed: zipfile.ZipFile) -> Iterator[_Member]:
    for info in packed.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _unsafe(archive, info.filename, "is a link or a device")
        path = _inside(archive, info.filename, folder=info.is_dir())
        if not info.is_dir():
            yield _Member(path, info.file_size, lambda info=info: packed.open(info))  # type: ignore[misc]


def _tar_members(archive: Path, bundle: tarfile.TarFile) -> Iterator[_Member]:
    for info in bundle:
        if not (info.isreg() or info.isdir()):
            raise _unsafe(archive, info.name, "is a link or a device")
        path = _inside(archive, info.name, folder=info.isdir())
        if info.isreg():
            yield _Member(path, info.size, lambda info=info: _opened(bundle, info))  # type: ignore[misc]


def _opened(bundle: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    stream = bundle.extractfile(info)
    if stream is None:
        raise tarfile.ExtractError(f"{info.name} cannot be opened")
    return stream


def _inside(archive: Path, name: str, *, folder: bool) -> PurePosixPath:
    """The path of a member, if it stays in the folder it is unpacked into, on every operating system."""
    path = PurePosixPath(name)
    nameless = not path.parts and not folder  # the folder "." is the one that is unpacked into
    if path.is_absolute() or ".." in path.parts or any(sign in name for sign in ("\\", ":", "\0")) or nameless:
        raise _unsafe(archive, name, "leads out of the folder")
    return path


def _unsafe(archive: Path, member: str, why: str) -> UserError:
    return UserError(f"{archive} is not unpacked because its member {member!r} {why}: it is not the published archive.")


def _place(archive: Path, folder: Path, member: _Member) -> IO[bytes]:
    """A new file for a member. A name that is a folder for another member, or is too long, is an error."""
    place = folder / member.path
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return place.open("xb")
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EILSEQ):
            raise
        raise _unsafe(archive, str(member.path)[-80:], f"cannot be placed ({error.strerror})") from error


def _unpack(archive: Path, folder: Path, max_bytes: int, members: list[_Member]) -> None:
    declared = sum(member.size for member in members)
    if declared > max_bytes:
        raise UserError(f"{archive} is not unpacked because it declares {declared} bytes, more than {max_bytes}.")
    names = [member.path for member in members]
    if len(set(names)) < len(names):
        raise UserError(f"{archive} is not unpacked because two of its members have one name.")
    folder.mkdir(parents=True)
    for member in members:
        with member.open() as stream, _place(archive, folder, member) as out:
            left = member.size
            while chunk := stream.read(CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise UserError(f"{archive} is not unpacked because {member.path} is longer than it declares.")
                out.write(chunk)
