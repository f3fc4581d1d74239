"""Micro-benchmarks for pytest-benchmark: `tox -e bench`, or `pytest --pyargs ringattn.bench.micro`."""
