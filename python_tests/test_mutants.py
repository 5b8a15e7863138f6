"""The mutation check's list fits the code."""

from __future__ import annotations

from mutants import MUTANTS, ROOT


def test_the_text_of_every_mutant_occurs_once() -> None:
    counts = {(m.file, m.old): (ROOT / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {mutant: count for mutant, count in counts.items() if count != 1} == {}
    assert all(m.old != m.new for m in MUTANTS)


def test_the_tests_of_every_mutant_exist() -> None:
    files = {m.tests.split()[0] for m in MUTANTS}
    assert [name for name in files if not (ROOT / "python_tests" / f"test_{name}.py").is_file()] == []
