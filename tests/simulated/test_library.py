"""Building: once per source and torch, safely from several processes, with the compiler's own words on failure."""

import threading

import pytest

from simulated import library

needs_posix = pytest.mark.skipif(library.os.name != "posix", reason="there is no build on this system")

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "stand-in 1.0" && exit 0
echo call >> "{log}"
{action}
while [ "$1" != -o ]; do shift; done
sleep 0.05
echo "object" > "$2"
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A compiler that writes small files and a line per call; `action` runs before it writes."""

    def install(action=""):
        program, log = tmp_path / "stand-in", tmp_path / "calls"
        program.write_text(COMPILER.format(log=log, action=action), encoding="utf-8")
        program.chmod(0o755)
        log.touch()
        monkeypatch.setenv("CXX", str(program))
        return lambda: len(log.read_text(encoding="utf-8").splitlines())

    return install


@needs_posix
def test_builds_once_and_keeps(tmp_path, stand_in):
    calls = stand_in()
    first = library.built(tmp_path / "cache")
    expected = len(list(library.SOURCES.glob("*.cpp"))) + 1
    assert first.exists() and calls() == expected
    assert library.built(tmp_path / "cache") == first and calls() == expected
    assert {path.name for path in first.parent.iterdir()} == {"libacc.so", "lock"}
    assert (tmp_path / "cache" / ".gitignore").read_text(encoding="utf-8") == "*\n"


@needs_posix
def test_two_builders_at_once_compile_once(tmp_path, stand_in):
    calls, found = stand_in(), []
    builders = [threading.Thread(target=lambda: found.append(library.built(tmp_path / "cache"))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(set(found)) == 1 and len(found) == 3
    assert calls() == len(list(library.SOURCES.glob("*.cpp"))) + 1


@needs_posix
def test_changed_source_or_compiler_builds_again(tmp_path, stand_in, monkeypatch):
    stand_in()
    first = library.built(tmp_path / "cache")
    (tmp_path / "csrc").mkdir()
    for source in library.SOURCES.iterdir():
        (tmp_path / "csrc" / source.name).write_bytes(source.read_bytes() + b"\n")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "csrc")
    second = library.built(tmp_path / "cache")
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O2"))
    assert len({first, second, library.built(tmp_path / "cache")}) == 3


@needs_posix
def test_failure_quotes_the_compiler_and_leaves_nothing(tmp_path, stand_in):
    stand_in(action='echo "error: expected a semicolon" >&2; exit 1')
    with pytest.raises(library.BuildError, match="expected a semicolon"):
        library.built(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so")) and not list((tmp_path / "cache").rglob("*.o"))


def test_reason_names_the_missing_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if library.os.name == "posix":
        assert "needs a C++ compiler" in library.reason()
    else:
        assert "Linux and macOS only" in library.reason()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.reason()
