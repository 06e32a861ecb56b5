"""Who owns an object: the same for all who know the same names, in equal shares, and stable."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.peers.placement import choose_copy, order_for_node, rank_nodes
from datasvc.repository.objects.objects import digest_of

DIGESTS = [digest_of(number.to_bytes(4, "big")) for number in range(4000)]
names = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
digests = st.integers(0, 2**32 - 1).map(lambda number: digest_of(number.to_bytes(4, "big")))


@given(digests, names, st.randoms(use_true_random=False))
def test_the_order_of_the_list_does_not_matter_and_each_node_has_one_rank(digest, nodes, random):
    shuffled = random.sample(nodes, len(nodes))
    assert rank_nodes(digest, shuffled) == rank_nodes(digest, nodes)
    assert sorted(rank_nodes(digest, nodes)) == sorted(nodes)


@given(digests, names, st.data())
def test_how_two_nodes_stand_to_each_other_does_not_depend_on_who_else_is_there(digest, nodes, data):
    some = data.draw(st.lists(st.sampled_from(nodes), unique=True))
    assert rank_nodes(digest, some) == [node for node in rank_nodes(digest, nodes) if node in some]


def test_a_node_that_leaves_moves_only_its_own_objects_and_to_all_others_alike():
    nodes = [f"http://node{number}:8765" for number in range(5)]
    before = {digest: rank_nodes(digest, nodes)[0] for digest in DIGESTS}
    after = {digest: rank_nodes(digest, nodes[:-1])[0] for digest in DIGESTS}
    moved = [digest for digest in DIGESTS if before[digest] != after[digest]]
    assert {before[digest] for digest in moved} == {nodes[-1]}
    heirs = Counter(after[digest] for digest in moved)
    assert min(heirs.values()) > 0.7 * len(moved) / 4


def test_every_node_owns_its_share():
    nodes = [f"http://10.0.0.{number}:8765" for number in range(8)]
    shares = Counter(rank_nodes(digest, nodes)[0] for digest in DIGESTS)
    assert all(abs(share - 500) < 100 for share in shares.values()), shares  # 4.8 standard deviations


def test_the_choice_is_the_same_for_ever():
    nodes = ["http://a:1", "http://b:1", "http://c:1"]
    assert "".join(rank_nodes(digest, nodes)[0][7] for digest in DIGESTS[:12]) == "ccbaabbbabbc"


def test_nodes_that_stage_the_same_objects_begin_with_different_ones_mostly_their_own():
    nodes = [f"http://node{number}:8765" for number in range(8)]
    orders = {node: order_for_node(DIGESTS, node) for node in nodes}
    for node, order in orders.items():
        assert sorted(order) == sorted(DIGESTS)
        owned = [rank_nodes(digest, nodes)[0] == node for digest in order]
        assert sum(owned[:100]) > 80
        assert sum(owned[2000:]) < 20
    firsts = Counter(digest for order in orders.values() for digest in order[:250])
    assert len(firsts) > 0.75 * 8 * 250


def test_copies_of_an_object_are_requested_from_all_nodes_that_have_it_early():
    nodes = [f"http://node{number}:8765" for number in range(8)]
    asked = Counter()
    for digest in DIGESTS:
        ranked = rank_nodes(digest, nodes)
        for rank, node in enumerate(ranked[1:], 1):
            copy = choose_copy(digest, ranked[:rank], node)
            assert copy in ranked[:rank]
            asked[copy] += 1
    mean = asked.total() / 8
    assert max(asked.values()) < 1.1 * mean, asked
