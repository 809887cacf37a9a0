"""The contract's own example."""

import doctest

from promptfed import method


def test_the_toy_in_the_contracts_docstring_runs() -> None:
    example = doctest.DocTestFinder(recurse=False).find(method.Method, "Method", globs={})[0]
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
