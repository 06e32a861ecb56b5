"""Numbers for the names under which an optimizer or a module of each rank meets its like on the others.

Invariant: ranks that have alike things alive, made in the same order, number them alike. Counting what was ever made
would not do: in an elastic job those that stay have made things before that newcomers have not.
"""

import itertools
from weakref import WeakValueDictionary

_owners: dict[str, WeakValueDictionary[int, object]] = {}


def take_number(kind: str, owner: object) -> int:
    """The lowest number that nothing alive of this kind has; the owner has it as long as it lives.

    Every rank calls this in the same order.
    """
    owners = _owners.setdefault(kind, WeakValueDictionary())
    number = next(number for number in itertools.count() if number not in owners)
    owners[number] = owner
    return number
