"""The MovieLens readers, on small files in the official formats."""

import gzip
import time

import numpy as np
import pytest

from auto_research.data import catalogue
from auto_research.data.movielens import read_1m, read_100k, read_latest_small
from auto_research.data.rows import MalformedRow
from auto_research.runtime.errors import UserError

MOVIES = (
    "movieId,title,genres\r\n"
    "1,Toy Story (1995),Adventure|Children\r\n"
    '3,"American President, The (1995)",Comedy\r\n'
    '7,"Say ""Hi""",(no genres listed)\r\n'
    "9,Never Rated (2001),Drama\r\n"
)
RATINGS = "userId,movieId,rating,timestamp\r\n1,3,4.0,964982703\r\n1,1,0.5,964981247\r\n5,7,5.0,1445714994\r\n"


@pytest.fixture
def latest(write, tmp_path):
    write("movies.csv", MOVIES)
    write("ratings.csv", RATINGS)
    return tmp_path


def test_latest_small(latest):
    x = read_latest_small(latest)
    assert x.items.title == ["Toy Story (1995)", "American President, The (1995)", 'Say "Hi"']
    assert x.items.raw_id == ["1", "3", "7"]
    assert x.items.year.tolist() == [1995, 1995, 0]
    assert x.items.genre_names == ("Adventure", "Children", "Comedy", "Drama")
    assert x.items.genres.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert (x.user.tolist(), x.item.tolist()) == ([0, 0, 1], [0, 1, 2])
    assert x.rating.tolist() == [0.5, 4.0, 5.0]
    assert x.time.tolist() == [964981247, 964982703, 1445714994]
    assert (x.user.dtype, x.item.dtype, x.time.dtype, x.rating.dtype) == ("int64", "int64", "int64", "float32")


def test_line_ends_and_compression_change_nothing(latest, write):
    x = read_latest_small(latest)
    write("movies.csv", MOVIES.replace("\r\n", "\n"))
    write("ratings.csv", RATINGS.replace("\r\n", "\n").rstrip("\n"))
    assert read_latest_small(latest).fingerprint == x.fingerprint
    (latest / "ratings.csv").unlink()
    write("ratings.csv.gz", gzip.compress(RATINGS.encode()))
    assert read_latest_small(latest).fingerprint == x.fingerprint
    write("ratings.csv.gz", gzip.compress(RATINGS.encode())[:-9])
    with pytest.raises(UserError, match=r"ratings\.csv\.gz is cut off or damaged"):
        read_latest_small(latest)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("1,3,4.0", "expected 4 columns divided by ',' (userId, movieId, rating, timestamp) but found 3"),
        ("1,3,4.0,9,9", "but found 5"),
        ("", "but found 0"),
        ("one,3,4.0,9", "userId 'one' is not a whole number"),
        ("-1,3,4.0,9", "userId '-1'"),
        ("1, 3,4.0,9", "movieId ' 3'"),
        ("1,3,6.0,9", "rating '6.0' is not a number of stars from 0.5 to 5 in steps of 0.5"),
        ("1,3,0.0,9", "rating '0.0'"),
        ("1,3,4.2,9", "rating '4.2'"),
        ("1,3,nan,9", "rating 'nan'"),
        ("1,3,4.0,-9", "timestamp '-9' is not a time in whole seconds since 1970"),
        ("1,3,4.0,1.5", "timestamp '1.5'"),
        ("1,3,4.0,99999999999999999999", "timestamp '99999999999999999999'"),
        ("1,4,4.0,9", "movieId 4 is not in movies.csv"),
        ("١,3,4.0,9", "userId '١' is not a whole number"),  # a digit of another script
    ],
)
def test_latest_small_refuses_a_malformed_rating(latest, write, row, why):
    path = write("ratings.csv", RATINGS + row + "\r\n1,1,3.0,9\r\n")
    with pytest.raises(MalformedRow) as caught:
        read_latest_small(latest)
    assert str(caught.value).startswith(f"{path}, line 5: ")
    assert why in str(caught.value)
    assert (caught.value.path, caught.value.line) == (path, 5)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("x,Film,Drama", "movieId 'x' is not a whole number"),
        ("3,Film,Drama", "movieId 3 already stands in an earlier row"),
        ("11,,Drama", "empty title or genre"),
        ("11,Film,Drama||War", "empty title or genre"),
        ("11,Film,Drama,War", "expected 3 columns"),
        ('11,"Film,Drama', "not a comma-separated row"),
    ],
)
def test_latest_small_refuses_a_malformed_movie(latest, write, row, why):
    path = write("movies.csv", MOVIES + row)
    with pytest.raises(MalformedRow) as caught:
        read_latest_small(latest)
    assert str(caught.value).startswith(f"{path}, line 6: ")
    assert why in str(caught.value)


def test_latest_small_refuses_bad_files(latest, write):
    write("ratings.csv", RATINGS.encode() + b"1,1,\xff.0,9\r\n")
    with pytest.raises(MalformedRow, match="line 5: byte 0xff is not UTF-8"):
        read_latest_small(latest)
    write("ratings.csv", RATINGS.replace("userId", "user"))
    with pytest.raises(MalformedRow, match="line 1: the header must be 'userId,movieId,rating,timestamp'"):
        read_latest_small(latest)
    write("ratings.csv", "userId,movieId,rating,timestamp\r\n")
    with pytest.raises(UserError, match="header but no rows"):
        read_latest_small(latest)
    write("ratings.csv", "")
    with pytest.raises(UserError, match=r"ratings\.csv is empty"):
        read_latest_small(latest)
    (latest / "ratings.csv").unlink()
    with pytest.raises(UserError, match=r"has no file ratings\.csv"):
        read_latest_small(latest)
    write("movies.csv", "movieId,title,genres\n")
    with pytest.raises(UserError, match="header but no rows"):
        read_latest_small(latest)


GENRES = "unknown|0\nAction|1\nComedy|2\n\n"  # the official file ends with an empty line
ITEMS = (
    "1|Toy Story (1995)|01-Jan-1995||http://us.imdb.com/M/title-exact?Toy%20Story%20(1995)|0|0|1\n"
    "2|Misérables, Les (1995)|01-Jan-1995||http://us.imdb.com/M?x|0|1|0\n"
    "3|unknown||||1|0|0\n"
)
USERS = "1|24|M|technician|85711\n2|53|F|other|T8H1N\n"
DATA = "2\t2\t3\t881250949\n1\t3\t5\t891717742\n1\t1\t1\t878887116\n"
INFO = "2 users\n3 items\n3 ratings\n"


@pytest.fixture
def hundred(write, tmp_path):
    write("u.genre", GENRES)
    write("u.item", ITEMS.encode("latin-1"))
    write("u.user", USERS)
    write("u.data", DATA)
    write("u.info", INFO)
    return tmp_path


def test_100k(hundred):
    x = read_100k(hundred)
    assert x.items.title == ["Toy Story (1995)", "Misérables, Les (1995)", "unknown"]
    assert x.items.genre_names == ("unknown", "Action", "Comedy")
    assert x.items.genres.argmax(axis=1).tolist() == [2, 1, 0]
    assert x.items.year.tolist() == [1995, 1995, 0]
    assert (x.user.tolist(), x.item.tolist(), x.rating.tolist()) == ([0, 0, 1], [0, 2, 1], [1, 5, 3])
    assert x.users is not None
    assert x.users.age.tolist() == [24, 53]
    assert [x.users.gender_names[g] for g in x.users.gender] == ["M", "F"]
    assert [x.users.occupation_names[o] for o in x.users.occupation] == ["technician", "other"]
    assert [x.users.zip_names[z] for z in x.users.zip] == ["85711", "T8H1N"]


@pytest.mark.parametrize(
    ("name", "row", "line", "why"),
    [
        ("u.data", "1\t1\t0\t9", 4, "rating '0' is not a whole number of stars from 1 to 5"),
        ("u.data", "1 1 3 9", 4, "expected 4 columns divided by '\\t'"),
        ("u.data", "9\t1\t3\t9", 4, "user id 9 is not in u.user"),
        ("u.data", "1\t9\t3\t9", 4, "item id 9 is not in u.item"),
        ("u.user", "3|x|M|artist|1", 3, "age 'x' is not an age in years"),
        ("u.user", "3|30|X|artist|1", 3, "gender 'X' is not M or F"),
        ("u.user", "1|30|M|artist|1", 3, "user id 1 already stands in an earlier row"),
        ("u.item", "4|Film|01-Jan-1995||u|0|2|0", 4, "genre Action '2' is not 0 or 1"),
        ("u.item", "4|Film|1995||u|0|1|0", 4, "release date '1995' is not a date such as"),
        ("u.item", "4|Film|01-Jan-1995||u|0|1", 4, "expected 8 columns"),
        ("u.item", "2|Film|01-Jan-1995||u|0|1|0", 4, "movie id 2 already stands"),
        ("u.genre", "War|7", 4, "the genre id must be 3"),
        ("u.info", "many users", 4, "is not a count"),
    ],
)
def test_100k_refuses_a_malformed_row(hundred, name, row, line, why):
    path = hundred / name
    (hundred / "u.info").write_text("2 users\n" if name != "u.info" else INFO)
    path.write_bytes(path.read_bytes().rstrip(b"\n") + b"\n" + row.encode() + b"\n")
    if name in ("u.user", "u.data"):
        (hundred / "u.info").unlink()
    with pytest.raises(MalformedRow) as caught:
        read_100k(hundred)
    assert f"{path}, line {line}: " in str(caught.value)
    assert why in str(caught.value)


def test_100k_notices_rows_lost_between_two_lines(hundred, write):
    write("u.data", DATA.split("\n", 1)[1])
    with pytest.raises(UserError, match=r"holds 2 ratings where u\.info states 3"):
        read_100k(hundred)


def test_1m(write, tmp_path):
    write("movies.dat", "1::Toy Story (1995)::Animation|Comedy\n2::Café: Noir (2000)::Drama\n".encode("latin-1"))
    write("users.dat", "1::F::1::10::48067\n6040::M::56::16::02460-1111\n")
    write("ratings.dat", "6040::2::5::956703932\n1::1::4::978300760\n6040::1::3::956703931\n")
    x = read_1m(tmp_path)
    assert x.items.title == ["Toy Story (1995)", "Café: Noir (2000)"]
    assert x.items.genre_names == ("Animation", "Comedy", "Drama")
    assert (x.user.tolist(), x.item.tolist(), x.rating.tolist()) == ([0, 1, 1], [0, 0, 1], [4, 3, 5])
    assert x.users is not None
    assert x.users.age.tolist() == [1, 56]
    assert [x.users.occupation_names[o] for o in x.users.occupation] == ["K-12 student", "self-employed"]
    for name, row, why in (
        ("ratings.dat", "1::1::4.5::9", "rating '4.5'"),
        ("ratings.dat", "1::1::4", "expected 4 columns divided by '::'"),
        ("ratings.dat", "2::1::4::9", "UserID 2 is not in users.dat"),
        ("ratings.dat", "1::7::4::9", "MovieID 7 is not in movies.dat"),
        ("users.dat", "2::F::30::10::48067", "age '30' is not an age group"),
        ("users.dat", "2::F::25::21::48067", "occupation '21' is not an occupation from 0 to 20"),
        ("movies.dat", "3::::Drama", "Title '' is not a title"),
        ("movies.dat", "3::Film::", "Genres '' is not a list of genres"),
    ):
        path = tmp_path / name
        sound = path.read_bytes()
        path.write_bytes(sound + row.encode() + b"\n")
        with pytest.raises(MalformedRow) as caught:
            read_1m(tmp_path)
        assert f"{path}, line {sound.count(10) + 1}: " in str(caught.value)
        assert why in str(caught.value)
        path.write_bytes(sound)


def test_the_embedded_edition_is_the_published_one(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTO_RESEARCH_CACHE", str(tmp_path))
    x = catalogue.load("ml-latest-small")
    assert (len(x), x.num_users, x.num_items) == (100_836, 610, 9_724)
    assert np.array_equal(np.unique(x.rating), np.arange(1, 11) / 2)
    assert x.items.has_text


def test_times_and_numbers_do_not_depend_on_the_time_zone(latest, monkeypatch):
    fingerprint = read_latest_small(latest).fingerprint
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert read_latest_small(latest).fingerprint == fingerprint
    finally:
        monkeypatch.undo()
        time.tzset()
