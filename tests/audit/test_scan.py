"""The scanner judges an adapter by its own syntax."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from auto_research.audit.scan import Scan, scan_file

IMPORT = "from auto_research.runtime.device import device_for\n"


def scanned(tmp_path: Path, source: str, function: str = "run", module: str = "pack.family.flat") -> Scan:
    path = tmp_path / "flat.py"
    path.write_text(dedent(source), encoding="utf-8")
    return scan_file(path, function, key="k", module=module)


EXPLICIT = {
    "direct": IMPORT + "def run(study):\n    return device_for(study.device)\n",
    "alias": """
        from auto_research.runtime.device import device_for as pick
        def run(study):
            return pick(study.device)
        """,
    "module alias": """
        import auto_research.runtime.device as d
        def run(study):
            return d.device_for(study.device)
        """,
    "dotted module": """
        import auto_research.runtime.device
        def run(study):
            return auto_research.runtime.device.device_for(study.device)
        """,
    "package member": """
        from auto_research.runtime import device
        def run(study):
            return device.device_for(study.device)
        """,
    "star import": """
        from auto_research.runtime.device import *
        def run(study):
            return device_for(study.device)
        """,
    "local alias": IMPORT + "def run(study):\n    pick = device_for\n    return pick(study.device)\n",
    "module-level alias before a shadow": IMPORT
    + "pick = device_for\ndef device_for(x): return 'cpu'\ndef run(study):\n    return pick(study.device)\n",
    "import inside the function": """
        def run(study):
            from auto_research.runtime.device import device_for
            return device_for(study.device)
        """,
    "conditional import": """
        try:
            from auto_research.runtime.device import device_for
        except ImportError:
            def device_for(name):
                return "cpu"
        def run(study):
            return device_for(study.device)
        """,
    "helper": IMPORT
    + "def helper(name):\n    return device_for(name)\ndef run(study):\n    return helper(study.device)\n",
    "two helpers deep, defined below": IMPORT
    + "def run(study): return one(study)\ndef one(s): return two(s)\ndef two(s): return device_for(s.device)\n",
    "nested function": IMPORT
    + "def run(study):\n    def inner():\n        return device_for('auto')\n    return inner()\n",
    "lambda": IMPORT + "def run(study):\n    return (lambda name: device_for(name))(study.device)\n",
    "module-level lambda that refers below": IMPORT
    + "run = lambda study: helper(study)\ndef helper(study): return device_for('auto')\n",
    "callback": IMPORT + "def arm(): return device_for('auto')\ndef run(study): return study.compare(train=arm)\n",
    "constant": IMPORT + "DEVICE = device_for('auto')\ndef run(study): return study.compare(DEVICE)\n",
    "decorator": IMPORT
    + """
def on_device(function):
    def wrapped(study):
        return function(study, device_for(study.device))
    return wrapped

@on_device
def run(study, device):
    return device
""",
    "decorated helper": IMPORT
    + "import functools\n@functools.cache\ndef helper(): return device_for('auto')\ndef run(study): return helper()\n",
    "constructor": IMPORT
    + "class Trainer:\n    def __init__(self): self.device = device_for('auto')\ndef run(study): Trainer()\n",
    "method": IMPORT
    + "class Trainer:\n    def fit(self): return device_for('auto')\ndef run(study): return Trainer().fit()\n",
    "class method": IMPORT
    + "class T:\n    @classmethod\n    def make(cls): return device_for('auto')\ndef run(study): T.make()\n",
    "static method": IMPORT
    + "class T:\n    @staticmethod\n    def make(): return device_for('auto')\ndef run(study): T.make()\n",
    "property": IMPORT
    + "class T:\n    @property\n    def device(self): return device_for('auto')\ndef run(study): return T().device\n",
    "inherited method": IMPORT
    + """
class Base:
    def prepare(self):
        return device_for("auto")
class Child(Base):
    def start(self):
        return self.prepare()
def run(study):
    return Child().start()
""",
    "forward of a module": IMPORT
    + """
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return x.to(device_for("auto"))
def run(study):
    return study.compare(Model())
""",
    "stored in an attribute": IMPORT
    + """
class T:
    def __init__(self):
        self.pick = device_for
    def go(self):
        return self.pick("auto")
def run(study):
    return T().go()
""",
    "passed as an argument": IMPORT + "def use(pick): return pick('auto')\ndef run(study): return use(device_for)\n",
    "passed by keyword": IMPORT
    + "def use(*, pick=None): return pick('auto')\ndef run(study): return use(pick=device_for)\n",
    "default argument": IMPORT + "def run(study, pick=device_for): return pick('auto')\n",
    "returned": IMPORT + "def choose(): return device_for\ndef run(study): return choose()('auto')\n",
    "partial": IMPORT
    + "from functools import partial\nPICK = partial(device_for, 'auto')\ndef run(study): return PICK()\n",
    "mapped": IMPORT + "def run(study): return list(map(device_for, ['cpu']))\n",
    "dispatch table": IMPORT
    + "TABLE = {'gpu': device_for, 'none': str}\ndef run(study): return TABLE['gpu']('auto')\n",
    "dispatch table by get": IMPORT
    + "TABLE = {'gpu': device_for}\ndef run(study): return TABLE.get(study.name)('auto')\n",
    "comprehension": IMPORT + "def run(study): return [device_for(d) for d in ('cpu',)]\n",
    "f-string": IMPORT + "def run(study): return f'{device_for(study.device)}'\n",
    "walrus": IMPORT + "def run(study):\n    if (device := device_for('auto')): return device\n",
    "with": IMPORT + "def run(study):\n    with study.stage('a'):\n        return device_for('auto')\n",
    "finally": IMPORT + "def run(study):\n    try:\n        pass\n    finally:\n        device_for('auto')\n",
    "match": IMPORT + "def run(study):\n    match study.x:\n        case 1:\n            device_for('auto')\n",
    "else of TYPE_CHECKING": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from collections.abc import Callable
        else:
            from auto_research.runtime.device import device_for
        def run(study):
            return device_for('auto')
        """,
    "import_module": """
        import importlib
        def run(study):
            return importlib.import_module("auto_research.runtime.device").device_for("auto")
        """,
    "getattr": """
        from auto_research.runtime import device
        def run(study):
            return getattr(device, "device_for")("auto")
        """,
    "async": IMPORT
    + "import asyncio\nasync def go(): return device_for('auto')\ndef run(s): return asyncio.run(go())\n",
    "generator": IMPORT + "def go():\n    yield device_for('auto')\ndef run(s): return next(go())\n",
    "partial entry": IMPORT
    + "import functools\ndef _run(study, key): return device_for('auto')\nrun = functools.partial(_run, key='a')\n",
    "made entry": IMPORT
    + "def make(key):\n    def inner(study): return device_for(key)\n    return inner\nrun = make('a')\n",
    "global": IMPORT
    + "PICK = None\ndef prepare():\n    global PICK\n    PICK = device_for\n"
    + "def run(study):\n    prepare()\n    return PICK('auto')\n",
    "recursion": IMPORT + "def run(study, n=2):\n    return run(study, n - 1) if n else device_for('auto')\n",
}

NOT_EXPLICIT = {
    "comment": "def run(study):\n    # device_for(study.device)\n    return 1\n",
    "string": "def run(study):\n    return 'device_for(study.device)'\n",
    "docstring": 'def run(study):\n    """Calls device_for(study.device)."""\n    return 1\n',
    "import alone": IMPORT + "def run(study): return 1\n",
    "mentioned and never called": IMPORT + "def run(study):\n    pick = device_for\n    return str(pick)\n",
    "neighbour": IMPORT + "def run(study): return 1\ndef run_other(study): return device_for('auto')\n",
    "neighbour's constant": IMPORT + "OTHER = device_for('auto')\ndef run(study): return 1\n",
    "neighbour's class": IMPORT
    + "class Other:\n    def fit(self): return device_for('auto')\nclass Mine:\n    def fit(self): return 1\n"
    + "def run(study): return Mine().fit()\n",
    "another entry of a dispatch table": IMPORT
    + "def a(): return 1\ndef b(): return device_for('auto')\nRUN = {'a': a, 'b': b}\n"
    + "def run(study): return RUN['a']()\n",
    "a method that nobody calls": IMPORT
    + "class T:\n    def fit(self): return 1\n    def on_gpu(self): return device_for('auto')\n"
    + "def run(study): return T().fit()\n",
    "nested function never called": IMPORT
    + "def run(study):\n    def inner():\n        return device_for('auto')\n    return 1\n",
    "local function of that name": "def device_for(name): return 'cpu'\ndef run(study): return device_for('auto')\n",
    "shadowed import": IMPORT + "def device_for(name): return 'cpu'\ndef run(study): return device_for('auto')\n",
    "shadowed in the function": IMPORT
    + "def run(study):\n    device_for = lambda name: 'cpu'\n    return device_for('auto')\n",
    "shadowed by a parameter": IMPORT
    + "def use(device_for): return device_for('auto')\ndef run(study): return use(str)\n",
    "shadowed by a loop": IMPORT + "def run(study):\n    for device_for in study.f: device_for('auto')\n",
    "deleted": IMPORT + "del device_for\ndef run(study): return device_for('auto')\n",
    "attribute of something else": IMPORT + "def run(study): return study.device_for('auto')\n",
    "another module's function": "from other.device import device_for\ndef run(study): return device_for('auto')\n",
    "own method of that name": "class T:\n    def device_for(self, n): return 'cpu'\n"
    + "def run(study): return T().device_for('auto')\n",
    "class attribute is not a global": IMPORT.replace("device_for\n", "device_for as real\n")
    + "class T:\n    device_for = real\n    def go(self): return device_for('auto')\ndef run(study): return T().go()\n",
    "if False": IMPORT + "def run(study):\n    if False:\n        return device_for('auto')\n    return 1\n",
    "if 0 and": IMPORT + "def run(study):\n    if 0 and study.x:\n        return device_for('auto')\n",
    "while False": IMPORT + "def run(study):\n    while False:\n        device_for('auto')\n",
    "else of True": IMPORT
    + "def run(study):\n    if not False:\n        return 1\n    else:\n        device_for('auto')\n",
    "False and": IMPORT + "def run(study): return False and device_for('auto')\n",
    "dead ternary": IMPORT + "def run(study): return device_for('auto') if False else 1\n",
    "after return": IMPORT + "def run(study):\n    return 1\n    device_for('auto')\n",
    "after raise": IMPORT
    + "def run(study):\n    if study.x:\n        raise ValueError\n    else:\n        return 1\n"
    + "    device_for('auto')\n",
    "TYPE_CHECKING": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from auto_research.runtime.device import device_for
        def device_for_(x): return x
        def run(study):
            return device_for('auto')
        """,
    "typing.TYPE_CHECKING in the function": IMPORT
    + "import typing\ndef run(study):\n    if typing.TYPE_CHECKING:\n        device_for('auto')\n",
    "script part": IMPORT + "def run(study): return 1\nif __name__ == '__main__':\n    device_for('auto')\n",
    "annotation": IMPORT + "def run(study):\n    x: device_for('auto') = 1\n    return x\n",
    "helper defined under __main__": IMPORT
    + "if __name__ == '__main__':\n    def helper(): return device_for('auto')\ndef run(study): return helper()\n",
    "helper in another file": "from .neighbour import helper\ndef run(study): return helper()\n",
    "decorated neighbour in a registry": IMPORT
    + """
REGISTRY = {}
def register(key):
    def wrap(function):
        REGISTRY[key] = function
        return function
    return wrap
@register("a")
def run(study):
    return 1
@register("b")
def other(study):
    return device_for("auto")
""",
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_an_explicit_path_is_found(tmp_path: Path, name: str) -> None:
    result = scanned(tmp_path, EXPLICIT[name])
    assert result.explicit
    assert all(site.chain[-1] == "device_for" and site.line > 0 for site in result.sites)


@pytest.mark.parametrize("name", NOT_EXPLICIT)
def test_what_only_looks_like_a_path_does_not_count(tmp_path: Path, name: str) -> None:
    assert scanned(tmp_path, NOT_EXPLICIT[name]).sites == []


def test_several_adapters_of_one_file_are_told_apart(tmp_path: Path) -> None:
    source = (
        IMPORT
        + """
def _shared(name):
    return device_for(name)

def run_neural(study):
    return _shared(study.device)

def run_popular(study):
    return "device_for"

def run_direct(study):
    return device_for(study.device)
"""
    )
    explicit = {f: scanned(tmp_path, source, f).explicit for f in ("run_neural", "run_popular", "run_direct")}
    assert explicit == {"run_neural": True, "run_popular": False, "run_direct": True}


def test_the_evidence_names_file_line_and_chain(tmp_path: Path) -> None:
    source = IMPORT + "\nclass T:\n    def fit(self):\n        return device_for('auto')\n\n"
    source += "def helper():\n    return T().fit()\n\ndef run(study):\n    return helper()\n"
    (site,) = scanned(tmp_path, source).sites
    assert (site.file, site.line) == (str(tmp_path / "flat.py"), 5)
    assert site.chain == ["run", "helper", "T.fit", "device_for"]


def test_the_chain_passes_through_a_constant(tmp_path: Path) -> None:
    (site,) = scanned(tmp_path, IMPORT + "DEVICE = device_for('auto')\ndef run(s): return DEVICE\n").sites
    assert site.chain == ["run", "DEVICE", "device_for"]


def test_re_exports_are_resolved_by_syntax_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "reexporting"
    (package / "inner").mkdir(parents=True)
    bomb = "raise RuntimeError('imported')\n"
    (package / "__init__.py").write_text("from .inner import choose\n" + bomb)
    (package / "inner" / "__init__.py").write_text("from ._impl import pick as choose\n" + bomb)
    (package / "inner" / "_impl.py").write_text(IMPORT + "pick = device_for\n" + bomb)
    (package / "fake.py").write_text("def device_for(x): return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    sources = {
        "from reexporting import choose\ndef run(s): return choose('auto')\n": True,
        "from .inner import choose as c\ndef run(s): return c('auto')\n" + bomb: True,
        "import reexporting.inner\ndef run(s): return reexporting.inner.choose('auto')\n": True,
        "from .fake import device_for\ndef run(s): return device_for('auto')\n": False,
        "from .inner import missing\ndef run(s): return missing('auto')\n": False,
    }
    for source, explicit in sources.items():
        (package / "adapter.py").write_text(source)
        result = scan_file(package / "adapter.py", module="reexporting.adapter")
        assert result.explicit is explicit, source
    assert not any(name.startswith("reexporting") for name in sys.modules)


def test_a_file_that_cannot_be_parsed_says_so(tmp_path: Path) -> None:
    result = scanned(tmp_path, "def run(:\n")
    assert not result.explicit
    assert "cannot be read as Python" in result.note


def test_a_missing_entry_and_an_entry_of_another_file_say_so(tmp_path: Path) -> None:
    assert "does not define 'run'" in scanned(tmp_path, "x = 1\n").note
    assert "another file" in scanned(tmp_path, "from .other import run\n").note


def test_a_binding_in_a_loop_is_seen_by_the_next_turn(tmp_path: Path) -> None:
    source = IMPORT + "def run(study):\n    pick = None\n    for i in range(2):\n"
    source += "        if pick: pick('auto')\n        pick = device_for\n"
    assert scanned(tmp_path, source).explicit


@pytest.mark.parametrize("depth", [700, 5000])  # the second is already too deep for the parser
def test_a_file_nested_too_deeply_says_so(tmp_path: Path, depth: int) -> None:
    result = scanned(tmp_path, "def run(s):\n    return s" + ".a" * depth)
    assert not result.explicit
    assert "nested too deeply" in result.note


@pytest.mark.parametrize(("arm", "explicit"), [(150, True), (None, False)])
def test_a_long_elif_chain_is_read_to_its_end(tmp_path: Path, arm: int | None, explicit: bool) -> None:
    """Each `elif` nests one level deeper in the syntax tree."""
    arms = [f"    elif s == {i}: {'device_for(s)' if i == arm else 'pass'}\n" for i in range(300)]
    result = scanned(tmp_path, IMPORT + "def run(s):\n    if s is None: pass\n" + "".join(arms))
    assert (result.explicit, result.note) == (explicit, "")


def test_a_long_sum_is_read_to_its_end(tmp_path: Path) -> None:
    result = scanned(tmp_path, IMPORT + f"def run(s):\n    return {'1 + ' * 900}device_for(s)\n")
    assert (result.explicit, result.note) == (True, "")


ENDLESS = {
    "a tree that holds its own kind": (
        "def tree(d):\n    return {'left': tree(d - 1) if d else None, 'leaf': leaf}\n"
        "def leaf(): return device_for('auto')\ndef run(s): return tree(3)['leaf']()\n",
        True,
    ),
    "two functions that wrap each other": (
        "def a(n): return {'k': b(n), 'g': device_for}\ndef b(n): return (a(n),)\ndef run(s): return a(1)\n",
        False,
    ),
    "an attribute that holds itself": (
        "class T:\n    def go(self):\n        self.x = [self.x, device_for]\n        return self.x\n"
        "def run(s): return T().go()[1]('auto')\n",
        True,
    ),
    "an argument wrapped at each call": ("def a(x): return a([x])\ndef run(s): return a([device_for])\n", False),
    "a dotted name that grows": (
        "import outside\ndef up(node): return up(node.parent)\ndef run(s):\n    up(outside.node)\n    device_for(s)\n",
        True,
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_values_that_nest_without_end_are_followed_to_an_end(tmp_path: Path, name: str) -> None:
    source, explicit = ENDLESS[name]
    assert scanned(tmp_path, IMPORT + source).explicit is explicit
