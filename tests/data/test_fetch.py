"""Downloads from a server in this process that misbehaves on demand, and archives that try to escape."""

import gzip
import hashlib
import io
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from auto_research.data.catalogue import Archive, DataFile, DatasetEntry
from auto_research.data.fetch import OFFLINE_VARIABLES, Downloader, extract, fetch
from auto_research.runtime.errors import UserError

TEXT = "".join(f"line {n} of a text\n" for n in range(20_000)).encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Site:
    """What the server offers and how it behaves; `requests` lists (path, Range header) as they came."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Each of the next answers ends after that many bytes of its body, then the connection is closed."""
    statuses: list[int] = field(default_factory=list)
    ranges: bool = True
    etag: str | None = '"v1"'
    declares_length: bool = True
    compresses: bool = False
    """Sends gzip although it was asked not to."""
    always: tuple[int, str] | None = None
    """Status and Content-Range of every answer to a request for a range."""


@pytest.fixture
def site(monkeypatch) -> Iterator[Site]:
    for name in OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_):
            pass

        def do_GET(self):
            wanted = self.headers.get("Range")
            state.requests.append((self.path, wanted))
            status = state.statuses.pop(0) if state.statuses else 200
            content = state.files.get(self.path)
            if status != 200 or content is None:
                self.send_error(404 if status == 200 else status)
                return
            begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if begin and self.headers.get("If-Range", state.etag) != state.etag:
                begin = 0
            if wanted and state.always:
                self.send_response(state.always[0])
                self.send_header("Content-Range", state.always[1])
                self.end_headers()
                return
            if state.compresses:
                content = gzip.compress(content)
            if begin >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            body = content[begin:]
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            if state.declares_length:
                self.send_header("Content-Length", str(len(body)))
            if state.compresses:
                self.send_header("Content-Encoding", "gzip")
            if state.etag:
                self.send_header("ETag", state.etag)
            self.end_headers()
            self.wfile.write(body[: state.cuts.pop(0)] if state.cuts else body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def text_entry(site: Site, **changes) -> DatasetEntry:
    """A data set of one text at the server."""
    site.files.setdefault("/input.txt", TEXT)
    file = DataFile(name="input.txt", sha256=(digest(TEXT),), size=len(TEXT), urls=(f"{site.url}/input.txt",))
    values = {
        "name": "some-text",
        "title": "Some text",
        "folder": "texts/some",
        "source": site.url,
        "licence": "public domain",
        "redistribution": "allowed",
        "reader": "auto_research.data.text:read_tiny_shakespeare",
        "files": (file,),
    }
    return DatasetEntry(**{**values, **changes})


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("AUTO_RESEARCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def quickly(entry: DatasetEntry, **more) -> Path:
    return fetch(entry, pause=0.0, **more)


def test_fetch_places_verified_files_and_their_source(site, cache):
    folder = quickly(text_entry(site))
    assert folder == cache / "texts" / "some"
    assert (folder / "input.txt").read_bytes() == TEXT
    assert digest(TEXT) in (folder / "SOURCE.json").read_text()
    assert sorted(p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock")) == ["some"]
    quickly(text_entry(site))
    assert len(site.requests) == 1  # the second call finds everything there


def test_a_cut_connection_is_resumed_where_it_ended(site):
    site.cuts = [100_000, 50_000]
    folder = quickly(text_entry(site))
    assert (folder / "input.txt").read_bytes() == TEXT
    ranges = [wanted for _, wanted in site.requests]
    assert ranges[0] is None
    begins = [int(wanted.removeprefix("bytes=").removesuffix("-")) for wanted in ranges[1:]]
    assert len(begins) == 2
    assert 0 < begins[0] <= 100_000
    assert begins[0] < begins[1] <= 150_000


def test_a_later_call_resumes_what_an_earlier_one_left(site):
    site.cuts = [100_000, *[0] * 20]
    with pytest.raises(UserError, match="continues where it stopped"):
        quickly(text_entry(site), retries=3)
    site.cuts.clear()
    before = len(site.requests)
    folder = quickly(text_entry(site))
    assert (folder / "input.txt").read_bytes() == TEXT
    assert [wanted is None for _, wanted in site.requests[before:]] == [False]


def test_a_server_that_ignores_ranges_is_read_from_the_start(site):
    site.ranges = False
    site.cuts = [100_000]
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT
    assert len(site.requests) == 2


def test_a_server_that_ignores_ranges_and_always_cuts_is_given_up(site):
    site.ranges = False
    site.cuts = [1000] * 50
    with pytest.raises(UserError, match="2 attempts without a new byte"):
        quickly(text_entry(site), retries=2)
    assert len(site.requests) <= 4


def test_a_server_that_starts_again_each_time_is_given_up_when_it_gets_no_further(site):
    site.ranges = False
    site.cuts = [50_000, 90_000, 60_000, 80_000, 70_000, 85_000, *[88_000, 60_000] * 50]
    with pytest.raises(UserError, match="3 attempts without a new byte"):
        quickly(text_entry(site), retries=3)
    assert len(site.requests) == 5


@pytest.mark.parametrize("answer", [(206, f"bytes 0-9/{len(TEXT)}"), (206, "nonsense"), (416, "")])
def test_a_server_that_answers_ranges_wrongly_is_read_from_the_start_or_given_up(site, answer):
    site.always = answer
    site.cuts = [50_000]
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT
    assert len(site.requests) == 3
    site.requests.clear()
    site.cuts = [50_000] * 100
    (quickly(text_entry(site)) / "input.txt").unlink()
    with pytest.raises(UserError, match="3 attempts without a new byte"):
        quickly(text_entry(site), retries=3)


def test_a_length_counted_in_compressed_bytes_is_not_that_of_the_file(site):
    site.compresses = True
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT
    assert len(site.requests) == 1


def test_a_changed_file_is_not_glued_to_an_old_beginning(site):
    old = TEXT.replace(b"text", b"TEXT")
    site.files["/input.txt"] = old
    site.cuts = [100_000, *[0] * 20]
    with pytest.raises(UserError):
        quickly(text_entry(site), retries=2)
    site.cuts.clear()
    site.files["/input.txt"], site.etag = TEXT, '"v2"'
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT


@pytest.mark.parametrize("old", [b"x" * 100, b"x" * (len(TEXT) + 10), b"x" * len(TEXT)])
def test_a_stale_beginning_without_a_tag_is_noticed_by_the_checksum(site, cache, old):
    site.etag = None
    partial = cache / "texts" / ".some.part" / "input.txt.download"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(old)
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT


def test_wrong_bytes_are_never_kept(site, cache):
    site.files["/input.txt"] = TEXT[:-1] + b"!"
    with pytest.raises(UserError, match="its SHA-256 differs"):
        quickly(text_entry(site))
    assert not [path for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    site.files["/input.txt"] = TEXT
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT


def test_a_short_file_that_nobody_knows_the_sum_of_is_resumed_by_its_length(site):
    file = DataFile(name="input.txt", urls=(f"{site.url}/input.txt",))
    site.cuts = [70_000]
    assert (quickly(text_entry(site, files=(file,))) / "input.txt").read_bytes() == TEXT


def test_an_answer_without_length_is_read_to_its_end(site):
    site.declares_length = False
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT


def test_the_next_address_serves_when_the_first_does_not(site):
    file = DataFile(name="input.txt", sha256=(digest(TEXT),), urls=(f"{site.url}/gone", f"{site.url}/input.txt"))
    assert (quickly(text_entry(site, files=(file,))) / "input.txt").read_bytes() == TEXT
    assert [path for path, _ in site.requests] == ["/gone", "/input.txt"]


def test_statuses(site):
    site.statuses = [503, 429]
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT
    assert len(site.requests) == 3
    missing = DataFile(name="input.txt", urls=(f"{site.url}/none.txt",))
    with pytest.raises(UserError, match="answered 404"):
        quickly(text_entry(site, name="other", folder="other", files=(missing,)))
    assert len(site.requests) == 4  # a 404 is not tried again


def test_no_server(site):
    nowhere = DataFile(name="input.txt", urls=("http://127.0.0.1:9/input.txt",))
    with pytest.raises(UserError, match="check the network"):
        quickly(text_entry(site, files=(nowhere,)), retries=2)


@pytest.mark.parametrize("name", OFFLINE_VARIABLES)
def test_offline_sends_nothing(site, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="says offline"):
        quickly(text_entry(site))
    assert site.requests == []
    monkeypatch.setenv(name, "0")
    quickly(text_entry(site))
    monkeypatch.setenv(name, "1")
    quickly(text_entry(site))  # what is there needs no network


def test_a_damaged_cache_is_fetched_again(site):
    folder = quickly(text_entry(site))
    (folder / "input.txt").write_bytes(TEXT[:1000])
    assert (quickly(text_entry(site)) / "input.txt").read_bytes() == TEXT


def test_files_that_the_reader_refuses_are_not_kept(site, cache):
    site.files["/input.txt"] = b"caf\xe9"
    file = DataFile(name="input.txt", urls=(f"{site.url}/input.txt",))
    with pytest.raises(UserError, match="not UTF-8"):
        quickly(text_entry(site, files=(file,)))
    assert not (cache / "texts" / "some").exists()


def test_concurrent_calls_download_once(site):
    entry = text_entry(site)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(quickly(entry))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(site.requests) == 1


def test_a_cache_that_is_a_file_is_one_sentence(site, cache):
    cache.parent.write_text("")
    with pytest.raises(UserError, match="set AUTO_RESEARCH_CACHE to another folder"):
        quickly(text_entry(site))


def test_progress_is_shown_in_bytes(site, tmp_path):
    site.cuts = [100_000]
    with Progress(console=Console(file=io.StringIO())) as progress:
        Downloader(pause=0.0, progress=progress)((text_entry(site).files[0].urls), tmp_path / "input.txt", ())
        (task,) = progress.tasks
    assert (task.completed, task.total, task.description) == (len(TEXT), len(TEXT), "input.txt")


# --- archives ---


def zipped(members: dict[str, bytes], **attributes: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = attributes.get("mode", stat.S_IFREG | 0o644) << 16
            archive.writestr(info, content)
    return out.getvalue()


def tarred(members: dict[str, bytes], kind: bytes = tarfile.REGTYPE, mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            info.size = len(content) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_fetch_unpacks_the_wanted_members(site, pack):
    site.files["/text.zip"] = pack({"top/input.txt": TEXT, "top/more/other.txt": b"x"})
    archive = Archive(url=f"{site.url}/text.zip", root="top", sha256=digest(site.files["/text.zip"]))
    entry = text_entry(site, files=(DataFile(name="input.txt", sha256=(digest(TEXT),)),), archive=archive)
    folder = quickly(entry)
    assert sorted(path.name for path in folder.iterdir()) == ["SOURCE.json", "input.txt"]
    assert (folder / "input.txt").read_bytes() == TEXT
    assert not (folder.parent / ".some.part").exists()


def test_fetch_refuses_an_archive_of_another_edition(site, cache):
    site.files["/text.zip"] = zipped({"top/readme": b"x"})
    archive = Archive(url=f"{site.url}/text.zip", root="top")
    entry = text_entry(site, files=(DataFile(name="input.txt"),), archive=archive)
    with pytest.raises(UserError, match=r"holds no top/input\.txt"):
        quickly(entry)
    site.files["/text.zip"] = zipped({"top/input.txt": b"another text"})
    entry = text_entry(site, files=(DataFile(name="input.txt", sha256=(digest(TEXT),)),), archive=archive)
    with pytest.raises(UserError, match="does not have the SHA-256"):
        quickly(entry)
    assert not (cache / "texts" / "some").exists()


@pytest.mark.parametrize(
    "content",
    [
        zipped({"ok.txt": b"1", "../evil.txt": b"2"}),
        zipped({"/tmp/evil.txt": b"2"}),
        zipped({"a/../../evil.txt": b"2"}),
        zipped({"C:\\evil.txt": b"2"}),
        zipped({"..\\evil.txt": b"2"}),
        zipped({"link": b"/etc/passwd"}, mode=stat.S_IFLNK | 0o777),
        tarred({"ok.txt": b"1", "../evil.txt": b"2"}),
        tarred({"/evil.txt": b"2"}),
        tarred({"link": b""}, kind=tarfile.SYMTYPE),
        tarred({"link": b""}, kind=tarfile.LNKTYPE),
        tarred({"pipe": b""}, kind=tarfile.FIFOTYPE),
        tarred({"device": b""}, kind=tarfile.CHRTYPE),
        tarred({".": b"2"}),
        zipped({"a": b"1", "a/b": b"2"}),  # one name as file and as folder
        tarred({"a/b": b"1", "a": b"2"}),
        tarred({"x" * 300: b"1"}),
    ],
    ids=lambda content: "archive",  # archives hold the time they were made: as names they would never repeat
)
def test_extract_refuses_members_that_leave_the_folder(write, tmp_path, content):
    packed = write("in/archive", content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="is not unpacked because its member"):
        extract(packed, tmp_path / "in" / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_extract_takes_the_folder_itself_for_granted(write, tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        top = tarfile.TarInfo("./")
        top.type = tarfile.DIRTYPE
        archive.addfile(top)
        archive.addfile(tarfile.TarInfo("./x"))
    extract(write("in.tar", packed.getvalue()), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


def test_extract_refuses_bombs(write, tmp_path):
    bomb = write("bomb.zip", zipped({f"{n}": bytes(1_000_000) for n in range(3)}))
    assert bomb.stat().st_size < 10_000
    with pytest.raises(UserError, match="declares 3000000 bytes, more than 2000000"):
        extract(bomb, tmp_path / "out", max_bytes=2_000_000)
    assert not (tmp_path / "out").exists()


def test_extract_refuses_a_member_longer_than_it_declares(write, tmp_path):
    content = zipped({"x": bytes(1_000_000)})
    declared = (1_000_000).to_bytes(4, "little")
    assert content.count(declared) == 2  # in the local header and in the directory
    lying = write("lying.zip", content.replace(declared, (10).to_bytes(4, "little")))
    with pytest.raises(UserError, match=r"damaged|longer than it declares"):
        extract(lying, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_extract_refuses_two_members_of_one_name(write, tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x", b"2")
    with pytest.raises(UserError, match="two of its members have one name"):
        extract(write("twice.zip", out.getvalue()), tmp_path / "out")


def test_extract_refuses_damaged_archives(write, tmp_path):
    sound = zipped({"x": TEXT})
    flipped = bytearray(sound)
    flipped[200] ^= 0xFF
    for content in (b"not an archive", sound[: len(sound) // 2], bytes(flipped), tarred({"x": TEXT})[:300]):
        with pytest.raises(UserError, match="fetch it again"):
            extract(write("damaged", content), tmp_path / "out")
        assert not (tmp_path / "out").exists()
