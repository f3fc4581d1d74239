"""Micro-benchmarks for pytest-benchmark: `tox -e bench`. Not collected by the tests."""
