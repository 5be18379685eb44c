"""The public data sets: where they come from, under which licence, and where they lie on this machine.

A data set is looked for in the user's `--dataset-dir`, then in the cache that `auto-research prepare` fills, then
among the files embedded in the package.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from auto_research.data import rows
from auto_research.runtime.cache import cache_folder
from auto_research.runtime.errors import MissingData, UserError, nearest

EMBEDDED = Path(__file__).parent / "embedded"

Origin = Literal["dataset-dir", "cache", "embedded"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataFile(_Entry):
    """A file of a data set.

    `sha256`: the contents known to be the published ones (several where editions differ in line ends only), empty
    if not known. `urls`: official address first, then others with the same rows; empty for a member of an archive.
    An `optional` file may be absent.
    """

    name: str = Field(pattern=r"^[\w.-]+$")
    sha256: tuple[str, ...] = ()
    size: int | None = None
    urls: tuple[str, ...] = ()
    optional: bool = False


class Archive(_Entry):
    """A zip or tar archive that holds the files in its folder `root`."""

    url: str
    root: str
    sha256: str | None = None
    size: int | None = None


class DatasetEntry(_Entry):
    """One data set. `folder` is its place under `--dataset-dir` and in the cache; `reader` is `module:function`.

    `embedded` is "" if the package does not hold the data set, otherwise it says what of it the package holds;
    `embedded_whole` if that is all its reader reads.
    `counts` are the numbers of users, items, ... that the published files have.
    """

    name: str
    title: str
    folder: str
    source: str
    licence: str
    redistribution: str
    reader: str
    files: tuple[DataFile, ...]
    archive: Archive | None = None
    embedded: str = ""
    embedded_whole: bool = False
    counts: dict[str, int] = {}

    @model_validator(mode="after")
    def _has_a_source(self) -> DatasetEntry:
        if self.archive is None and not all(file.urls or file.optional for file in self.files):
            raise ValueError(f"{self.name}: a file without address needs an archive")
        return self

    @property
    def size(self) -> int | None:
        """Bytes to download; None if not known."""
        sizes = [file.size for file in self.files if file.urls] if self.archive is None else [self.archive.size]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def read(self, folder: Path) -> Any:
        """Parse the files in `folder`. UserError (with file and line) if they are not in the published format."""
        module, function = self.reader.split(":")
        return getattr(importlib.import_module(module), function)(folder)

    def differing(self, folder: Path) -> list[str]:
        """Names of the files in `folder` whose content is known not to be the published one, or missing."""
        names = []
        for file in self.files:
            path = rows.find(folder, file.name)
            if path is None:
                if not file.optional:
                    names.append(file.name)
            elif file.sha256 and sha256(path, plain=path.name != file.name) not in file.sha256:
                names.append(file.name)
        return names


@dataclass(frozen=True)
class Located:
    """Where a data set was found."""

    path: Path
    origin: Origin


def sha256(path: Path, plain: bool = False) -> str:
    """SHA-256 (hex) of a file; with `plain`, of its decompressed content ("" if it cannot be decompressed)."""
    if plain:
        try:
            return hashlib.sha256(rows.read_bytes(path)).hexdigest()
        except UserError:
            return ""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def entry(name: str) -> DatasetEntry:
    """The catalogue's entry; UserError with the nearest known name if there is none."""
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise UserError(f"unknown data set {name!r}.{nearest(name, CATALOGUE)} Known: {known}.")
    return CATALOGUE[name]


def cached_path(entry: DatasetEntry) -> Path:
    """The folder that `prepare` fills."""
    return cache_folder("data", *entry.folder.split("/"))


def find(name: str, dataset_dir: Path | str | None = None) -> Located | None:
    """Where the data set lies: under `dataset_dir`, in the cache, embedded; None if nowhere."""
    wanted = entry(name)
    if dataset_dir is not None and (given := Path(dataset_dir).expanduser() / wanted.folder).is_dir():
        return Located(given, "dataset-dir")
    if (cached := cached_path(wanted)).is_dir():
        return Located(cached, "cache")
    if wanted.embedded:
        return Located(EMBEDDED / wanted.name, "embedded")
    return None


def locate(name: str, dataset_dir: Path | str | None = None) -> Path:
    """The data set's folder: `dataset_dir/<folder>`, the cache, or the embedded files, in that order.

    Raises UserError for an unknown name, MissingData (which names the command that fetches it) if it is nowhere.
    """
    found = find(name, dataset_dir)
    if found is None:
        place = Path(dataset_dir) / entry(name).folder if dataset_dir is not None else None
        raise MissingData(
            name,
            f"the data set {name} is not on this machine: run `auto-research prepare {name}`, or lay its files in "
            + (f"{place}." if place else f"<folder>/{entry(name).folder} and pass --dataset-dir <folder>."),
        )
    return found.path


def load(name: str, dataset_dir: Path | str | None = None) -> Any:
    """The parsed data set: Interactions, SequenceSplit, texts or problems, as its reader's docstring says.

    Raises MissingData if it is nowhere. A file that cannot be parsed is one UserError with file and line, which also
    says whether the file's checksum is the published one.
    """
    path = locate(name, dataset_dir)
    try:
        return entry(name).read(path)
    except UserError as error:
        differing = [file for file in entry(name).differing(path) if rows.find(path, file)]
        if not differing or path.is_relative_to(EMBEDDED):
            raise
        raise UserError(f"{error} (SHA-256 shows that this is not the published {', '.join(differing)}.)") from error


def fingerprint(loaded: Any) -> str:
    """SHA-256 (hex) of what `load` returned: its own `fingerprint`, or that of its texts or problems."""
    own = getattr(loaded, "fingerprint", None)
    return own if isinstance(own, str) else hashlib.sha256(repr(loaded).encode("utf-8", "surrogatepass")).hexdigest()


_GITHUB = "https://raw.githubusercontent.com"
_GROUPLENS = "https://files.grouplens.org/datasets/movielens"
_GROUPLENS_RESEARCH = "GroupLens research licence: research use, no commercial use, cite Harper and Konstan 2015"
_AMAZON_RESEARCH = "research use; cite McAuley et al. 2015 / Ni et al. 2019"


def _minionerec(category: str, name: str, title: str, known: dict[str, tuple[str, int]]) -> DatasetEntry:
    base = f"{_GITHUB}/AkaliKong/MiniOneRec/main/data/Amazon"
    paths = {
        "train.csv": f"train/{category}_5_2016-10-2018-11.csv",
        "valid.csv": f"valid/{category}_5_2016-10-2018-11.csv",
        "test.csv": f"test/{category}_5_2016-10-2018-11.csv",
        "info.txt": f"info/{category}_5_2016-10-2018-11.txt",
        "item.json": f"index/{category}.item.json",
        "index.json": f"index/{category}.index.json",
    }
    return DatasetEntry(
        name=name,
        title=title,
        folder=f"minionerec/{category}",
        source="https://github.com/AkaliKong/MiniOneRec",
        licence=_AMAZON_RESEARCH,
        redistribution="not embedded; fetched from the MiniOneRec repository",
        reader="auto_research.data.amazon:read_minionerec",
        files=tuple(
            DataFile(
                name=file,
                sha256=known[file][:1] if file in known else (),
                size=known[file][1] if file in known else None,
                urls=(f"{base}/{path}",),
                optional=file == "train.csv",
            )
            for file, path in paths.items()
        ),
    )


_ENTRIES = (
    DatasetEntry(
        name="ml-latest-small",
        title="MovieLens latest-small, September 2018",
        folder="ml-latest-small",
        source="https://grouplens.org/datasets/movielens/latest/",
        licence=_GROUPLENS_RESEARCH,
        redistribution="allowed under the same conditions; README.txt travels with it",
        reader="auto_research.data.movielens:read_latest_small",
        files=(
            DataFile(
                name="ratings.csv",
                sha256=("aa289ca83157595d0df6aea1be6a4ded676ddc4385472e8313a8ed9805352646",),
                size=2_483_723,
            ),
            DataFile(
                name="movies.csv",
                sha256=("5a5f32dd9bb3797b8e728a1b98958789d2b13f294a69fdfbc5727f8a9611aa07",),
                size=494_431,
            ),
            DataFile(
                name="tags.csv",
                sha256=("92a9f8bb7916dceef6151209845788c3643f794dfa79d1feaec7121b5960399d",),
                size=118_660,
                optional=True,
            ),
            DataFile(
                name="README.txt",
                sha256=("63d22ac138e80fae37021797ed8e1b9424b5239dc576a137422adf783ae3f404",),
                size=8_342,
                optional=True,
            ),
        ),
        archive=Archive(
            url=f"{_GROUPLENS}/ml-latest-small.zip",
            root="ml-latest-small",
            sha256="696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
            size=978_202,
        ),
        embedded="ratings, movies, tags and licence",
        embedded_whole=True,
        counts={"users": 610, "items": 9_724, "events": 100_836},
    ),
    DatasetEntry(
        name="ml-100k",
        title="MovieLens 100K",
        folder="ml-100k",
        source="https://grouplens.org/datasets/movielens/100k/",
        licence=_GROUPLENS_RESEARCH,
        redistribution="not allowed: never embedded",
        reader="auto_research.data.movielens:read_100k",
        files=(
            DataFile(
                name="u.data",
                sha256=("06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",),
                size=1_979_173,
            ),
            DataFile(
                name="u.item",
                sha256=("553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",),
                size=236_344,
            ),
            DataFile(
                name="u.user",
                sha256=("f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",),
                size=22_628,
            ),
            DataFile(
                name="u.genre",
                sha256=("9757e0d3e6b298159a80dd48eaf938114690e911e39af97a76949ef1663610bb",),
                size=202,
            ),
            DataFile(
                name="u.info",
                sha256=("5b0a40b2e47a729ee6203063f6dcf8790c2e63f5a18663e6ee318a72c5f3c27b",),
                size=36,
                optional=True,
            ),
            DataFile(
                name="u.occupation",
                sha256=("cd5fbec9afe345d993a62fc7817df1a4a9079c4feb267b3118763b8fd942137d",),
                size=193,
                optional=True,
            ),
            DataFile(
                name="README",
                sha256=("4883b8cf340ed0059971b33f56ad3adc88a40792108ebca3d24aafc4c82e8b52",),
                size=6_750,
                optional=True,
            ),
        ),
        archive=Archive(
            url=f"{_GROUPLENS}/ml-100k.zip",
            root="ml-100k",
            sha256="50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
            size=4_924_029,
        ),
        counts={"users": 943, "items": 1_682, "events": 100_000},
    ),
    DatasetEntry(
        name="ml-1m",
        title="MovieLens 1M",
        folder="ml-1m",
        source="https://grouplens.org/datasets/movielens/1m/",
        licence=_GROUPLENS_RESEARCH,
        redistribution="not allowed: never embedded",
        reader="auto_research.data.movielens:read_1m",
        files=(
            DataFile(name="ratings.dat"),
            DataFile(name="movies.dat"),
            DataFile(name="users.dat"),
            DataFile(name="README", optional=True),
        ),
        archive=Archive(
            url=f"{_GROUPLENS}/ml-1m.zip",
            root="ml-1m",
            sha256="a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
            size=5_917_549,
        ),
        counts={"users": 6_040, "items": 3_706, "events": 1_000_209},
    ),
    DatasetEntry(
        name="amazon-beauty",
        title="Amazon Beauty 5-core 2014 as id sequences",
        folder="amazon-beauty",
        source="https://github.com/RUCAIBox/CIKM2020-S3Rec",
        licence=_AMAZON_RESEARCH,
        redistribution="not embedded; ids only",
        reader="auto_research.data.amazon:read_beauty_sequences",
        files=(
            DataFile(
                name="sequential_data.txt",
                sha256=(
                    "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8",  # LF
                    "f85a84ab47d70e82bf0e7301804270af10fb51e127ab8f0885697d593f6f6d43",  # CRLF
                ),
                size=1_090_094,
                urls=(
                    f"{_GITHUB}/RUCAIBox/CIKM2020-S3Rec/master/data/Beauty.txt",
                    f"{_GITHUB}/salesforce/ICLRec/4afb54a036ebbf4166ed5858122d89c0642251a7/data/Beauty.txt",
                ),
            ),
            DataFile(
                name="datamaps.json",  # of the P5 edition, which has no address for single files
                sha256=("715ab04838ff1ba21238475ed453a89e8c30aa6214b904d27a79e4168fc7b612",),
                size=1_835_529,
                optional=True,
            ),
        ),
        counts={"users": 22_363, "items": 12_101, "events": 198_502},
    ),
    DatasetEntry(
        name="amazon-beauty-5core",
        title="Amazon Beauty 5-core 2014, raw reviews and product metadata",
        folder="amazon-beauty-5core",
        source="https://jmcauley.ucsd.edu/data/amazon/",
        licence=_AMAZON_RESEARCH,
        redistribution="not embedded",
        reader="auto_research.data.amazon:read_5core_json",
        files=(
            DataFile(
                name="reviews_Beauty_5.json.gz",
                urls=("https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/reviews_Beauty_5.json.gz",),
            ),
            DataFile(
                name="meta_Beauty.json.gz",
                urls=("https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/meta_Beauty.json.gz",),
                optional=True,
            ),
        ),
        counts={"users": 22_363, "items": 12_101, "events": 198_502},
    ),
    _minionerec(
        "Office_Products",
        "office-products",
        "Amazon Office Products 2018, MiniOneRec split",
        {
            "index.json": ("f599d2b858beb5a2f660d6253896746c25a65f3a7d0c2f3ae6fd4ec2091eebc8", 142_839),
            "info.txt": ("7e8bae0a051a377713364b9e669590f86feb869fc269157c64b2189c0f4bcfa4", 361_392),
            "item.json": ("398cb2bb7868bedf2ed8ed6b24d25e172f21b7022554d1f8ea52200478494c1c", 2_570_582),
            "test.csv": ("c1967034e197a7837a8962f2556efaabc12eb5bb84e1fdc79cd0accbce71add5", 3_310_265),
            "valid.csv": ("a7d8f049ae425f413def22687cebcd172c65833633ff76dd3d90a83bca98234f", 3_038_060),
        },
    ),
    _minionerec(
        "Industrial_and_Scientific",
        "industrial-scientific",
        "Amazon Industrial and Scientific 2018, MiniOneRec split",
        {},
    ),
    DatasetEntry(
        name="wikitext-2",
        title="WikiText-2",
        folder="wikitext-2",
        source="https://github.com/pytorch/examples/tree/main/word_language_model",
        licence="CC BY-SA 3.0",
        redistribution="allowed with attribution under the same licence",
        reader="auto_research.data.text:read_wikitext2",
        files=(
            DataFile(
                name="train.txt",
                urls=(f"{_GITHUB}/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt",),
                optional=True,
            ),
            DataFile(
                name="valid.txt",
                sha256=("f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",),
                size=1_121_681,
                urls=(f"{_GITHUB}/pytorch/examples/main/word_language_model/data/wikitext-2/valid.txt",),
            ),
            DataFile(
                name="test.txt",
                sha256=("d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",),
                size=1_256_449,
                urls=(f"{_GITHUB}/pytorch/examples/main/word_language_model/data/wikitext-2/test.txt",),
            ),
        ),
        embedded="valid and test",
    ),
    DatasetEntry(
        name="gsm8k",
        title="GSM8K, grade-school word problems",
        folder="gsm8k",
        source="https://github.com/openai/grade-school-math",
        licence="MIT",
        redistribution="allowed with the licence notice",
        reader="auto_research.data.reasoning:read_gsm8k",
        files=(
            DataFile(
                name="train.jsonl",
                sha256=("17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",),
                size=4_166_206,
                urls=(f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/train.jsonl",),
            ),
            DataFile(
                name="test.jsonl",
                sha256=("3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",),
                size=749_738,
                urls=(f"{_GITHUB}/openai/grade-school-math/master/grade_school_math/data/test.jsonl",),
            ),
        ),
        embedded="the first 800 problems of train and the first 200 of test",
        counts={"train": 7_473, "test": 1_319},
    ),
    DatasetEntry(
        name="tiny-shakespeare",
        title="Tiny Shakespeare",
        folder="tiny-shakespeare",
        source="https://github.com/karpathy/char-rnn",
        licence="public domain",
        redistribution="allowed",
        reader="auto_research.data.text:read_tiny_shakespeare",
        files=(
            DataFile(
                name="input.txt",
                sha256=("86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",),
                size=1_115_394,
                urls=(f"{_GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
            ),
        ),
        embedded="all of it",
        embedded_whole=True,
    ),
    DatasetEntry(
        name="alpaca-en-demo",
        title="Alpaca-style instructions, LLaMA-Factory's demo set",
        folder="alpaca",
        source="https://github.com/hiyouga/LLaMA-Factory",
        licence="Apache-2.0",
        redistribution="not embedded; fetched from the LLaMA-Factory repository",
        reader="auto_research.data.text:read_alpaca",
        files=(
            DataFile(
                name="alpaca_en_demo.json",
                sha256=("bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318",),
                size=859_893,
                urls=(f"{_GITHUB}/hiyouga/LLaMA-Factory/main/data/alpaca_en_demo.json",),
            ),
        ),
    ),
    DatasetEntry(
        name="dpo-en-demo",
        title="English preference pairs, LLaMA-Factory's demo set",
        folder="preferences",
        source="https://github.com/hiyouga/LLaMA-Factory",
        licence="Apache-2.0",
        redistribution="not embedded; fetched from the LLaMA-Factory repository",
        reader="auto_research.data.preferences:read_dpo_demo",
        files=(
            DataFile(
                name="dpo_en_demo.json",
                sha256=("b949be2421cfa62744afcf1b479f95b299d643d1a4c1c97d1341b314a1aa5cb3",),
                size=1_575_286,
                urls=(f"{_GITHUB}/hiyouga/LLaMA-Factory/main/data/dpo_en_demo.json",),
            ),
        ),
        counts={"pairs": 300},
    ),
    DatasetEntry(
        name="ultrafeedback",
        title="UltraFeedback, binarised by Hugging Face H4: preference pairs",
        folder="ultrafeedback",
        source="https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized",
        licence="MIT",
        redistribution="allowed with the licence notice; not embedded for its size",
        reader="auto_research.data.preferences:read_ultrafeedback",
        files=tuple(
            DataFile(
                name=file,
                urls=tuple(
                    f"https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized/resolve/{commit}/data/{file}"
                    for commit in ("292c16329d921287c4166934cac1a6ad1e13a6c5", "main")
                ),
            )
            for file in ("train_prefs-00000-of-00001.parquet", "test_prefs-00000-of-00001.parquet")
        ),
        counts={"train": 61_135, "test": 2_000},
    ),
)

CATALOGUE: dict[str, DatasetEntry] = {entry.name: entry for entry in _ENTRIES}
