"""The tables of docs/scaling.md are those that the program writes."""

from __future__ import annotations

from tests.bench.scale import cluster_page


def test_the_committed_tables_are_those_of_the_program():
    text = cluster_page.PAGE.read_text("utf-8")
    assert all(f"<!-- table: {name} -->\n|" in text for name in cluster_page.TABLES)
    assert cluster_page.page(text) == text


def test_the_program_prints_every_table(capsys):
    assert cluster_page.main([]) == 0
    printed = capsys.readouterr().out
    assert all(make().markdown in printed for make in cluster_page.TABLES.values())
