from datasvc.printable import count_text


def test_a_number_has_the_singular_or_plural_of_its_noun():
    assert [count_text(count, "shard") for count in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert [count_text(count, "batch", "batches") for count in (1, 3)] == ["1 batch", "3 batches"]
    assert count_text(1, "key is", "keys are") == "1 key is"
