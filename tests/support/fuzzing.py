"""Fuzzers count what became of their inputs: one whose inputs are all refused, or never, tests less than it says."""

from collections import Counter
from functools import wraps

from hypothesis import strategies as st


def changed_bytes(content, values=None):
    """Return a strategy of `content` with one byte replaced, by one of `values` if they are given."""
    places = st.integers(0, len(content) - 1)
    values = st.binary(min_size=1, max_size=1) if values is None else values
    return st.builds(lambda place, value: content[:place] + value + content[place + 1 :], places, values)


def counts_refusals(*refusals):
    """Let a hypothesis property raise `refusals`, and require that it did for some inputs, and not for others.

    Goes above `@given`, and below the marks of pytest.
    """

    def decorate(prop):
        outcomes, inner = Counter(), prop.hypothesis.inner_test

        @wraps(inner)
        def count_one(*arguments, **options):
            try:
                inner(*arguments, **options)
            except refusals:
                outcomes["refused"] += 1
            else:
                outcomes["accepted"] += 1

        prop.hypothesis.inner_test = count_one

        @wraps(prop)
        def count_all(*arguments, **options):
            outcomes.clear()
            prop(*arguments, **options)
            assert outcomes["refused"], f"nothing was refused: {dict(outcomes)}"
            assert outcomes["accepted"], f"nothing was accepted: {dict(outcomes)}"

        return count_all

    return decorate
