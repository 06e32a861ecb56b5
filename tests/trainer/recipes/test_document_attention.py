"""Attention inside documents is that of a mask, and its work is that of the documents."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import varlen

from datasvc.trainer.recipes.models import document_attention, gpt
from datasvc.trainer.recipes.models.document_attention import mask_documents, plan_documents
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, BLOCK = 13, 24


@st.composite
def batches(draw):
    """Draw the documents of some blocks, with padding or without; in some cases their tokens alternate."""
    if draw(st.booleans()):
        numbers = st.lists(st.integers(-1, 3), min_size=BLOCK, max_size=BLOCK)
        return torch.tensor(draw(st.lists(numbers, min_size=1, max_size=3)), dtype=torch.int32)
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
        bounds = [0, *sorted(draw(st.sets(st.integers(1, BLOCK - 1)))), BLOCK]
        numbers = [number for number, size in enumerate(map(int.__sub__, bounds[1:], bounds)) for _ in range(size)]
        real = draw(st.sampled_from([BLOCK, bounds[-2]]))
        blocks.append([number if place < real else -1 for place, number in enumerate(numbers)])
    return torch.tensor(blocks, dtype=torch.int32)


def make_gpt(**options):
    torch.manual_seed(0)
    sizes = {"context": BLOCK, "layers": 2, "heads": 2, "width": 16, "dropout": 0.0}
    return gpt.GPT(VOCABULARY, **{**sizes, **options})


def step(model, ids, call=None):
    """Return the logits of a batch, and the gradients of all parameters."""
    tokens = torch.randint(VOCABULARY, ids.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    logits = (model if call is None else call)(tokens, document_ids=ids)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def step_masked(model, ids):
    """Return what `step` does, of attention with a mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "plan_documents", mask_documents)
        return step(model, ids)


def assert_equal_steps(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@examples(40)
@given(batches())
def test_logits_and_gradients_are_those_of_a_mask(ids):
    assert_equal_steps(step(make_gpt(), ids), step_masked(make_gpt(), ids))


@examples(40)
@given(st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=40), min_size=1, max_size=4))
def test_work_is_in_proportion_to_the_squares_of_lengths(blocks):
    block = max(map(sum, blocks)) + 1
    ids = torch.full((len(blocks), block), -1)
    for row, sizes in zip(ids, blocks, strict=True):
        row[: sum(sizes)] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    lengths = [*itertools.chain(*blocks), *(block - sum(sizes) for sizes in blocks)]
    plan = plan_documents(ids)
    assert sum(count for count, _ in plan.groups) == len(lengths) == len(plan.cu_seqlens) - 1
    assert sum(count * size**2 for count, size in plan.groups) <= sum(size**2 for size in lengths) / 0.75**2
    assert all(shorter < 0.75 * longer for (_, longer), (_, shorter) in itertools.pairwise(plan.groups))


def test_blocks_of_one_document_each_need_no_plan():
    assert plan_documents(torch.tensor([[0, 0, 0], [-1, -1, -1]])) is None
    assert plan_documents(torch.zeros(0, 5, dtype=torch.int32)) is None


def test_a_document_with_nan_changes_no_other():
    heads = torch.randn(1, 6, 3, 1, 4)
    heads[0, 0] = torch.nan
    heads.requires_grad_()
    plan = plan_documents(torch.tensor([[0, 1, 1, 1, 2, 2]]))
    document_attention.attend_documents(heads, plan, 0.0)[0, 1:].sum().backward()
    assert heads.grad[0, 1:].isfinite().all()


def test_dropout_acts_in_documents():
    ids = torch.tensor([[0] * 10 + [1] * 14])
    model = make_gpt(dropout=0.5)
    for name in ("dropout", "blocks.0.attention.out_dropout", "blocks.1.attention.out_dropout"):
        model.get_submodule(name).p = 0.0
    for number in "01":
        model.blocks[int(number)].mlp[3].p = 0.0
    first, second = step(model, ids)[0], step(model, ids)[0]
    assert not torch.allclose(first, second)
    model.eval()
    assert torch.equal(step(model, ids)[0], step(model, ids)[0])


def test_the_kernel_of_a_gpu_gets_documents_as_it_takes_them(monkeypatch):
    """The kernel is a stand-in; torch checks the arguments, as for tensors without data."""
    calls = []

    def attend(query, key, value, *bounds, **options):
        given_ = (each.to("meta") if isinstance(each, torch.Tensor) else each for each in bounds)
        assert real(*(each.to("meta") for each in (query, key, value)), *given_, **options).shape == query.shape
        starts, starts_of_keys, longest, longest_of_keys = bounds
        assert options == {"window_size": (-1, 0)}
        assert starts.dtype == torch.int32
        assert starts is starts_of_keys
        assert longest == longest_of_keys == int(starts.diff().max())
        calls.append(starts.tolist())
        documents = (
            [each.transpose(0, 1) for each in tensor.split(starts.diff().tolist())] for tensor in (query, key, value)
        )
        parts = [F.scaled_dot_product_attention(*each, is_causal=True) for each in zip(*documents, strict=True)]
        return torch.cat(parts, 1).transpose(0, 1)

    real = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    ids = torch.tensor([[0] * 5 + [1] * 19, [0] * 20 + [-1] * 4], dtype=torch.int32)
    expected = step_masked(make_gpt(), ids)
    step(make_gpt(), ids)
    assert calls == []  # not on a CPU
    monkeypatch.setattr(document_attention, "_has_kernel", lambda flat, dropout: True)
    assert_equal_steps(step(make_gpt(), ids), expected)
    assert calls == [[0, 5, 24, 44, 48]] * 2
    alternating = torch.tensor([[0, 1] * 12])
    assert_equal_steps(step(make_gpt(), alternating), step_masked(make_gpt(), alternating))
    assert len(calls) == 2


def test_the_kernel_of_a_gpu_gets_no_dropout_and_no_heads_that_are_not_aligned(monkeypatch):
    """pytorch/pytorch#194818: such heads are wrong results or faults of `varlen_attn`, which does not pad them."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(document_attention, "SDPAParams", lambda *params: params)
    for flash in (True, False):
        monkeypatch.setattr(document_attention, "can_use_flash_attention", lambda _, flash=flash: flash)
        for width, dropout, expected in ((8, 0.0, flash), (12, 0.0, False), (8, 0.1, False)):
            heads = torch.zeros(5, 3, 2, width, device="cpu")
            assert document_attention._has_kernel(heads.as_subclass(OnGpu), dropout) is expected
            assert not document_attention._has_kernel(heads, dropout)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_steps_and_is_not_compiled_again_for_other_documents():
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    model = make_gpt()
    compiled = torch.compile(model, backend=backend)
    for number, sizes in enumerate(([5, 19], [1, 2, 3, 18], [12, 6, 6], [23, 1])):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).expand(2, -1)
        assert_equal_steps(step(model, ids, compiled), step_masked(model, ids))
        if number == 0:
            num_graphs = len(graphs)
    assert len(graphs) == num_graphs
