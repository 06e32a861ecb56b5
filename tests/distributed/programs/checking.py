"""Runs the ``check_`` functions of a program one after the other, as every rank must."""

import contextlib
import sys
import traceback


def run_checks(namespace):
    for name, check in list(namespace.items()):
        if name.startswith("check_"):
            try:
                check()
            except BaseException:
                traceback.print_exc()
                sys.exit(f"FAILED: {name}")


def counting(submit, sent):
    """Return `submit`, which then also appends the bytes of its tensors to `sent`."""

    def counted(tensors, *args, **options):
        sent.append(sum(t.nbytes for t in (tensors if isinstance(tensors, list) else [tensors])))
        return submit(tensors, *args, **options)

    return counted


@contextlib.contextmanager
def raises(kind, *words):
    caught = None
    try:
        yield
    except kind as error:
        caught = str(error)
    assert caught is not None, f"{kind.__name__} was not raised"
    missing = [word for word in words if word not in caught]
    assert not missing, f"{missing} not in {caught}"
