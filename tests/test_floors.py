"""A floor imports only from floors below it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "auto_research"

BELOW = {
    "runtime": set(),
    "execution": {"runtime"},
    "rehearsal": {"runtime"},
    "data": {"runtime"},
    "checkpoints": {"runtime", "data"},
    "layers": {"runtime"},
    "tasks": {"runtime", "data", "checkpoints", "layers"},
    "study": {"runtime", "execution", "data", "checkpoints", "layers", "tasks"},
    "papers": {"runtime", "execution", "data", "checkpoints", "layers", "tasks", "study"},
    "audit": {"runtime", "execution", "rehearsal", "study", "papers"},
    "evolve": {"runtime", "execution", "rehearsal", "data", "checkpoints", "layers", "tasks", "study", "papers"},
    "cli": {
        "runtime", "execution", "rehearsal", "data", "checkpoints", "layers", "tasks", "study", "papers", "audit",
        "evolve",
    },
}  # fmt: skip


def imported_floors(path: Path) -> set[str]:
    floors = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["auto_research", *path.relative_to(SOURCE).parent.parts]
            base = package[: len(package) + 1 - node.level] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "auto_research" and len(parts) > 1 and parts[1] in BELOW:
                floors.add(parts[1])
    return floors


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_only_from_below(path):
    parts = path.relative_to(SOURCE).parts
    if len(parts) == 1:
        assert not imported_floors(path)
        return
    floor = parts[0]
    assert floor in BELOW, f"{path} stands on no floor"
    above = imported_floors(path) - BELOW[floor] - {floor}
    assert not above, f"{path} imports from {above}, which is not below {floor}"


def test_one_paper_never_imports_another():
    papers = SOURCE / "papers"
    for path in papers.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("auto_research.papers."):
                assert module.split(".")[2].startswith("_"), f"{path}:{node.lineno} imports another paper"
