import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Layers this small only wait for each other in several threads."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
