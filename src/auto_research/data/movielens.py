"""MovieLens ratings as published by GroupLens (https://grouplens.org/datasets/movielens/).

Each reader takes the folder of the unpacked official archive. Only movies that someone rated become items.
F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from auto_research.data.rows import (
    SECONDS,
    WHOLE,
    Column,
    MalformedRow,
    Table,
    find,
    iter_csv,
    read_lines,
    read_table,
    require,
)
from auto_research.data.sequences import Ids, Interactions, ItemTable, UserTable
from auto_research.runtime.errors import UserError

# "Toy Story (1995)", "Fawlty Towers (1975-1979)", "Fargo (2014-)", "The Land Before Time III (1995) (V)"
_YEAR = re.compile(r"\(([12][0-9]{3})(?:[-–](?:[0-9]{4})?)?\)(?: \(V\))?\s*$")
_NO_GENRE = "(no genres listed)"

_STARS = Column("rating", "[1-5]", "a whole number of stars from 1 to 5")
_HALF_STARS = Column("rating", r"0\.5|[1-4](?:\.[05])?|5(?:\.0)?", "a number of stars from 0.5 to 5 in steps of 0.5")


def read_latest_small(folder: Path | str) -> Interactions:
    """MovieLens latest-small: `ratings.csv` and `movies.csv`, UTF-8 with a header and CRLF or LF line ends.

    100,836 ratings of 9,724 movies by 610 users in the edition of September 2018; ratings from 0.5 to 5.
    Raises UserError for a missing or empty file, MalformedRow (file, line) for a row outside the format.
    """
    folder = Path(folder)
    raw_ids, titles, genre_lists = _latest_movies(require(folder, "movies.csv"))
    ratings = read_table(
        require(folder, "ratings.csv"),
        _rating_columns("userId", "movieId", _HALF_STARS, "timestamp"),
        ",",
        header=True,
    )
    return Interactions.from_events(
        "ml-latest-small",
        ratings.ints("userId"),
        ratings.index_in("movieId", np.array(raw_ids, dtype=np.int64), "movies.csv"),
        ratings.floats("rating"),
        ratings.ints("timestamp"),
        _movies(raw_ids, titles, *_genre_matrix(genre_lists)),
    )


def read_100k(folder: Path | str) -> Interactions:
    """MovieLens 100K: `u.data` (tabs), `u.item`, `u.user` and `u.genre` (|, latin-1).

    100,000 ratings (1 to 5) of 1,682 movies by 943 users with demographics. Where `u.info` lies beside them, the
    counts must be the ones it states. Raises UserError and MalformedRow as `read_latest_small`.
    """
    folder = Path(folder)
    genre_names = _genre_names(require(folder, "u.genre"))
    flags = [Column(f"genre {name}", "[01]", "0 or 1") for name in genre_names]
    movies = read_table(
        require(folder, "u.item"),
        [
            _id("movie id"),
            Column("movie title", r"[^|]*[^|\s][^|]*", "a title"),
            Column("release date", r"(?:[0-9]{1,2}-[A-Z][a-z]{2}-[0-9]{4})?", "a date such as 01-Jan-1995"),
            Column("video release date", r"[^|]*", "a date"),
            Column("IMDb URL", r"[^|]*", "an address"),
            *flags,
        ],
        "|",
        encoding="latin-1",
    )
    users = read_table(
        require(folder, "u.user"),
        [_id("user id"), _AGE, _GENDER, _named("occupation"), _named("zip code")],
        "|",
        encoding="latin-1",
    )
    ratings = read_table(
        require(folder, "u.data"),
        _rating_columns("user id", "item id", _STARS, "timestamp"),
        "\t",
        encoding="latin-1",
    )
    _check_info(folder, users=len(users), items=len(movies), ratings=len(ratings))
    genres = np.stack([movies.ints(flag.name) == 1 for flag in flags], axis=1)
    return Interactions.from_events(
        "ml-100k",
        ratings.index_in("user id", users.unique_ints("user id"), "u.user"),
        ratings.index_in("item id", movies.unique_ints("movie id"), "u.item"),
        ratings.floats("rating"),
        ratings.ints("timestamp"),
        _movies(movies.text("movie id"), movies.text("movie title"), genres, genre_names),
        _demographics(users, users.text("occupation")),
    )


# The occupation codes of MovieLens 1M, from its README.
OCCUPATIONS_1M = (
    "other",
    "academic/educator",
    "artist",
    "clerical/admin",
    "college/grad student",
    "customer service",
    "doctor/health care",
    "executive/managerial",
    "farmer",
    "homemaker",
    "K-12 student",
    "lawyer",
    "programmer",
    "retired",
    "sales/marketing",
    "scientist",
    "self-employed",
    "technician/engineer",
    "tradesman/craftsman",
    "unemployed",
    "writer",
)


def read_1m(folder: Path | str) -> Interactions:
    """MovieLens 1M: `ratings.dat`, `movies.dat` and `users.dat` (::, latin-1).

    1,000,209 ratings (1 to 5) of 3,706 movies by 6,040 users with demographics; `age` is the lower end of the age
    group. Raises UserError and MalformedRow as `read_latest_small`.
    """
    folder = Path(folder)
    movies = read_table(
        require(folder, "movies.dat"),
        [
            _id("MovieID"),
            Column("Title", r".*?\S.*?", "a title"),
            Column("Genres", r"[^|:]+(?:\|[^|:]+)*", "a list of genres divided by |"),
        ],
        "::",
        encoding="latin-1",
    )
    users = read_table(
        require(folder, "users.dat"),
        [
            _id("UserID"),
            _GENDER,
            Column("age", "1|18|25|35|45|50|56", "an age group: 1, 18, 25, 35, 45, 50 or 56"),
            Column("occupation", "1?[0-9]|20", "an occupation from 0 to 20"),
            Column("zip code", r"[^:]+", "a zip code"),
        ],
        "::",
        encoding="latin-1",
    )
    ratings = read_table(
        require(folder, "ratings.dat"),
        _rating_columns("UserID", "MovieID", _STARS, "Timestamp"),
        "::",
        encoding="latin-1",
    )
    return Interactions.from_events(
        "ml-1m",
        ratings.index_in("UserID", users.unique_ints("UserID"), "users.dat"),
        ratings.index_in("MovieID", movies.unique_ints("MovieID"), "movies.dat"),
        ratings.floats("rating"),
        ratings.ints("Timestamp"),
        _movies(
            movies.text("MovieID"),
            movies.text("Title"),
            *_genre_matrix([genres.split("|") for genres in movies.text("Genres")]),
        ),
        _demographics(users, [OCCUPATIONS_1M[code] for code in users.ints("occupation").tolist()]),
    )


_AGE = Column("age", "[0-9]{1,3}", "an age in years")
_GENDER = Column("gender", "[MF]", "M or F")


def _id(name: str) -> Column:
    return Column(name, WHOLE, "a whole number")


def _named(name: str) -> Column:
    return Column(name, r"[^|]*[^|\s][^|]*", f"a {name}")


def _rating_columns(user: str, item: str, rating: Column, time: str) -> list[Column]:
    return [_id(user), _id(item), rating, Column(time, WHOLE, SECONDS)]


def _latest_movies(path: Path) -> tuple[list[str], list[str], list[list[str]]]:
    """Ids, titles and genres of `movies.csv`, whose titles may be quoted."""
    titles: dict[str, str] = {}
    genre_lists: list[list[str]] = []
    for line, (raw_id, title, genres) in iter_csv(path, ("movieId", "title", "genres")):
        if not re.fullmatch(WHOLE, raw_id):
            raise MalformedRow(path, line, f"movieId {raw_id!r} is not a whole number")
        if raw_id in titles:
            raise MalformedRow(path, line, f"movieId {raw_id} already stands in an earlier row")
        names = [] if genres == _NO_GENRE else genres.split("|")
        if not title.strip() or not all(names):
            raise MalformedRow(path, line, f"movie {raw_id} has an empty title or genre")
        titles[raw_id] = title.strip()
        genre_lists.append(names)
    if not titles:
        raise UserError(f"{path} has a header but no rows: fetch it again.")
    return list(titles), list(titles.values()), genre_lists


def _genre_names(path: Path) -> tuple[str, ...]:
    """The names of `u.genre`, whose rows count from 0."""
    table = read_table(path, [Column("genre", r"[^|]+", "a name"), _id("genre id")], "|", encoding="latin-1")
    wrong = table.ints("genre id") != np.arange(len(table))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise table.error(row, f"the genre id must be {row}")
    return tuple(table.text("genre"))


def _genre_matrix(genre_lists: Sequence[Sequence[str]]) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """`(I, G)` membership and the sorted names of G genres."""
    names = sorted({name for genres in genre_lists for name in genres})
    column = {name: g for g, name in enumerate(names)}
    matrix = np.zeros((len(genre_lists), len(names)), dtype=bool)
    row = np.repeat(np.arange(len(genre_lists)), [len(genres) for genres in genre_lists])
    matrix[row, [column[name] for genres in genre_lists for name in genres]] = True
    return matrix, tuple(names)


def _movies(
    raw_ids: list[str], titles: list[str], genres: NDArray[np.bool_], genre_names: tuple[str, ...]
) -> ItemTable:
    found = [_YEAR.search(title) for title in titles]
    year = np.array([int(match[1]) if match else 0 for match in found], dtype=np.int64)
    return ItemTable(raw_id=raw_ids, title=titles, genres=genres, genre_names=genre_names, year=year)


def _demographics(users: Table, occupation: list[str]) -> UserTable:
    gender_names, gender = _codes(users.text("gender"))
    occupation_names, occupation_code = _codes(occupation)
    zip_names, zip_code = _codes(users.text("zip code"))
    return UserTable(
        gender=gender,
        age=users.ints("age"),
        occupation=occupation_code,
        zip=zip_code,
        gender_names=gender_names,
        occupation_names=occupation_names,
        zip_names=zip_names,
    )


def _codes(values: list[str]) -> tuple[tuple[str, ...], Ids]:
    """The sorted distinct values, and each value's place among them."""
    names = sorted(set(values))
    place = {name: code for code, name in enumerate(names)}
    return tuple(names), np.array([place[value] for value in values], dtype=np.int64)


def _check_info(folder: Path, **found: int) -> None:
    """Compare counts with `u.info`, which shows a file that was cut between two lines."""
    path = find(folder, "u.info")
    if path is None:
        return
    for line, text in enumerate(read_lines(path, "latin-1"), start=1):
        match = re.fullmatch(r"([0-9]{1,18}) (users|items|ratings)", text)
        if match is None:
            raise MalformedRow(path, line, f"{text!r} is not a count of users, items or ratings")
        count, what = int(match[1]), match[2]
        if found[what] != count:
            raise UserError(
                f"{folder} holds {found[what]} {what} where u.info states {count}: the data set is not complete, "
                "fetch it again."
            )
