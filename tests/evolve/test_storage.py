"""The sampler's history in Optuna: rebuilt from trials, mirrored to SQLite and to a real PostgreSQL."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_plan import DATA, SIZES, TOY, config, fake, search
from toy import ToyWorkflow

from auto_research.evolve import storage
from auto_research.evolve.plan import plan_generation
from auto_research.evolve.promotion import summarise
from auto_research.evolve.records import RunConfig, Trial
from auto_research.runtime.errors import UserError


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Any]:
    opened = storage.open_storage(None, tmp_path / "run")
    yield opened
    opened.engine.dispose()


def contents(study: Any) -> list[tuple[Any, ...]]:
    return [(t.number, t.state.name, t.values, t.params, t.constraints, t.user_attrs) for t in study.get_trials()]


def rows(settings: RunConfig, trials: list[Trial]) -> list[tuple[Any, ...]]:
    return contents(storage.history(settings, TOY, trials))


def test_history_holds_values_states_and_constraints() -> None:
    class Limited(ToyWorkflow):
        def violations(self, metrics: Any) -> list[str]:
            return ["too close", "too odd"] if metrics["closeness"] > 0.85 else []

    settings = config(generations=1)
    _, trials = search(settings)
    study = storage.history(settings, Limited(), trials)
    kept = study.get_trials()
    assert [t.user_attrs["candidate"] for t in kept] == ["baseline", "g1-1", "g1-2", "g1-3"]
    assert [t.state.name for t in kept] == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL"]  # the last is a duplicate
    assert [t.values for t in kept[:3]] == [[t.mean] for t in trials[:3]]
    assert kept[0].params == TOY.space.baseline()
    assert [t.constraints for t in kept[:2]] == [{"violations": 0.0}, {"violations": 2.0}]
    assert [t.user_attrs["candidate"] for t in study.get_trials() if t.user_attrs["generation"] == 1] == [
        "g1-1", "g1-2", "g1-3",
    ]  # fmt: skip


def test_partial_trials_have_no_value() -> None:
    settings = config(generations=1)
    _, trials = search(settings)
    broken = trials[1].cells[2].model_copy(update={"state": "failed", "metrics": None})
    trials[1] = summarise(trials[1].candidate, [*trials[1].cells[:2], broken], settings.seeds, TOY, z=1)
    assert trials[1].state == "partial"
    assert storage.history(settings, TOY, trials).get_trials()[1].state.name == "FAIL"


def test_random_search_is_out_of_sight() -> None:
    settings = config(generations=1)
    _, trials = search(settings)
    stray = trials[1].model_copy(
        update={"candidate": trials[1].candidate.model_copy(update={"id": "random-1", "origin": "random-search"})}
    )
    assert rows(settings, [stray, *trials]) == rows(settings, trials)


def test_nsga2_optimises_metric_and_flops_over_the_runs_generations() -> None:
    settings = config(sampler="nsga2", population=2)
    _, trials = search(settings.model_copy(update={"generations": 1}))
    study = storage.history(settings, TOY, trials)
    assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert study.get_trials()[1].values == [trials[1].mean, trials[1].candidate.flops]
    made = storage.sampler(settings, 2, 7, completed=3)
    parents = made.get_parent_population(study, 2)  # type: ignore[attr-defined]
    # of the baseline, `bias` (better, dearer) and `exchange` (worse, as cheap as the baseline), two survive
    assert {t.user_attrs["candidate"] for t in parents} == {"baseline", "g1-1"}
    assert made.population_size == 2  # type: ignore[attr-defined]


def test_seeds_come_from_the_run_seed_and_the_trial_number() -> None:
    def first(run_seed: int, number: int) -> Any:
        settings = config(sampler="random", run_seed=run_seed)
        study = storage.history(settings, TOY, [])
        study.sampler = storage.sampler(settings, 2, number, 0)
        return study.ask(fixed_distributions={"train.lr": storage.distribution(TOY.space["train.lr"])}).params

    assert first(0, 5) == first(0, 5)
    assert len({first(0, 5)["train.lr"], first(0, 6)["train.lr"], first(1, 5)["train.lr"]}) == 3
    assert storage.seed_of(1, 23) != storage.seed_of(12, 3)


# ------------------------------------------------------------------------------------------------- mirroring


def followed(opened: Any) -> None:
    """A run mirrored step by step, as a controller does, ends in the history that is rebuilt from its trials."""
    settings = config(sampler="tpe", generations=2, population=2)
    plans, trials = search(settings)
    study = storage.open_study(settings, TOY, opened)
    done: list[Trial] = []
    for plan in plans:
        planned = [summarise(c, [], settings.seeds, TOY, z=1) for c in plan.candidates]
        storage.mirror(study, settings, TOY, [*done, *planned])
        states = [t.state.name for t in study.get_trials()][len(done) :]
        assert states == ["FAIL" if c.duplicate_of else "RUNNING" for c in plan.candidates]
        done += [t for t in trials if t.candidate.generation == plan.generation]
        storage.mirror(study, settings, TOY, done)
        assert contents(study) == rows(settings, done)
    storage.mirror(study, settings, TOY, done)
    again = storage.open_study(settings, TOY, opened)
    assert contents(again) == rows(settings, done)
    lost = storage.open_study(settings.model_copy(update={"run": "rebuilt"}), TOY, opened)
    storage.mirror(lost, settings, TOY, done)
    assert contents(lost) == contents(again)


def test_sqlite_follows_a_run(sqlite: Any) -> None:
    followed(sqlite)


def test_a_crash_between_asking_and_planning_leaves_nothing_open(sqlite: Any) -> None:
    settings = config(generations=1)
    plans, trials = search(settings)
    study = storage.open_study(settings, TOY, sqlite)
    storage.mirror(study, settings, TOY, trials[:1])
    study.enqueue_trial({"train.lr": 0.2}, user_attrs={"candidate": "g1-1"})  # died before asking
    study.ask(fixed_distributions=storage.distributions(TOY.space, trials[0].candidate.genome))
    study.enqueue_trial({"train.lr": 0.3})
    planned = [summarise(c, [], settings.seeds, TOY, z=1) for c in plans[1].candidates]
    storage.mirror(study, settings, TOY, [trials[0], *planned])
    found = [(t.user_attrs.get("candidate"), t.state.name) for t in study.get_trials()]
    assert found[:3] == [("baseline", "COMPLETE"), ("g1-1", "FAIL"), (None, "FAIL")]
    assert [row for row in found if row[1] == "RUNNING"] == [("g1-1", "RUNNING"), ("g1-2", "RUNNING")]
    storage.mirror(study, settings, TOY, trials)
    assert not [t for t in study.get_trials() if not t.state.is_finished()]
    complete = [t.user_attrs["candidate"] for t in study.get_trials() if t.state.name == "COMPLETE"]
    assert complete == ["baseline", "g1-1", "g1-2"]


def test_a_trial_that_was_given_up_and_then_finished_is_told_anew(sqlite: Any) -> None:
    settings = config(generations=0)
    made = plan_generation(settings, TOY, 0, None, [], SIZES, DATA).candidates[0]
    study = storage.open_study(settings, TOY, sqlite)
    storage.mirror(study, settings, TOY, [summarise(made, [], settings.seeds, TOY, z=1)])
    storage.mirror(study, settings, TOY, [])  # nobody knows it: FAIL
    storage.mirror(study, settings, TOY, [fake(made, 0.5)])
    assert [t.state.name for t in study.get_trials()] == ["FAIL", "COMPLETE"]


def test_writers_wait_for_a_locked_sqlite_file(sqlite: Any, tmp_path: Path) -> None:
    with sqlite.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000  # ms; 5,000 by default
    settings = config(generations=1)
    _, trials = search(settings)
    study = storage.open_study(settings, TOY, sqlite)
    locked = threading.Event()

    def hold() -> None:
        with contextlib.closing(sqlite3.connect(tmp_path / "run" / "optuna.db")) as other:
            other.execute("BEGIN EXCLUSIVE")
            locked.set()
            time.sleep(0.3)
            other.rollback()

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()
    storage.mirror(study, settings, TOY, trials)
    holder.join()
    assert contents(study) == rows(settings, trials)


# ------------------------------------------------------------------------------------------------------- URLs


def test_a_url_names_the_file(tmp_path: Path) -> None:
    opened = storage.open_storage(f"sqlite:///{tmp_path}/deep/er/history.db", tmp_path)
    opened.engine.dispose()
    assert (tmp_path / "deep/er/history.db").is_file()
    assert not (tmp_path / "optuna.db").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "the storage is no database URL"),
        ("mysql://me:secret@host/db", "storage of kind 'mysql' is not known"),
    ],
)
def test_a_wrong_url_is_one_sentence(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        storage.open_storage(url, tmp_path)


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("no database " * 100)
    with pytest.raises(UserError, match="file is not a database"):
        storage.open_storage(f"sqlite:///{tmp_path}/x.db", tmp_path)


def test_an_absent_server_is_one_sentence_without_the_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    with pytest.raises(UserError) as caught:
        storage.open_storage("postgresql://me:hunter2@127.0.0.1:1/db", tmp_path)
    assert "postgresql://me:***@127.0.0.1:1/db cannot be used" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_missing_driver_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(UserError, match=r"pip install 'auto-research\[postgres\]'"):
        storage.open_storage("postgresql://me@localhost/db", tmp_path)


# -------------------------------------------------------------------------------------------------- PostgreSQL


def server_programs() -> Path | None:
    """The folder of initdb and pg_ctl: Debian keeps them out of PATH, the newest release last."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name))
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).resolve().parent)
    usable = [folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()]
    return usable[-1] if usable else None


@pytest.fixture
def postgres() -> Iterator[str]:
    """A PostgreSQL server of its own, on a socket in a temporary folder; its URL."""
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed: pip install 'auto-research[postgres]'")
    programs = server_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql), so no server can be started")
    user = getpass.getuser()
    if os.geteuid() == 0:  # it refuses to run as root
        user = next((u.pw_name for u in pwd.getpwall() if u.pw_name in ("postgres", "nobody")), user)
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # short: a socket's path is limited to 107 bytes
    as_user: dict[str, Any] = {"cwd": folder, "check": True, "capture_output": True, "timeout": 120}
    if os.geteuid() == 0:
        shutil.chown(folder, user)
        as_user |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    data = folder / "data"
    try:
        subprocess.run([programs / "initdb", "-D", data, "-A", "trust", "-U", "tester", "-N", "-E", "UTF8"], **as_user)
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        start = [programs / "pg_ctl", "-D", data, "-l", folder / "log", "-o", options, "-w", "start"]
        subprocess.run(start, **{**as_user, "capture_output": False, "stdout": subprocess.DEVNULL})
        try:
            yield f"postgresql://tester@/postgres?host={folder}"
        finally:
            subprocess.run([programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"], **as_user)
    finally:
        shutil.rmtree(folder)


def test_postgresql_follows_a_run(postgres: str, tmp_path: Path) -> None:
    opened = storage.open_storage(postgres, tmp_path)
    assert opened.engine.dialect.name == "postgresql"
    followed(opened)
    opened.engine.dispose()
    assert not (tmp_path / "optuna.db").exists()
