"""What `--sync` excludes is refused when the settings are made, which is before the ranks connect."""

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.options import parse_options
from datasvc.trainer.recipes.settings.sync_exclusions import EXCLUSIONS, SERVER_EXCLUSIONS, format_exclusions
from tests.support.pages import find_page

WORDS = ("--data", "a@1", "--repo", "r", "--name", "n")
# By option of the table, the words that set it beside --leases.
LEASES = {
    "--leases with hierarchical, easgd, gossip, tournament, fragments, delay or alpha": (),
    "--leases with --skip": ("--skip", "3"),
    "--leases with --decode-group": ("--decode-group", "/dev/shm/group"),
    "--leases with --tune-loader": ("--tune-loader",),
}
# By option of the table, the words that set it.
EXCLUDED = {
    "--layout with other axes than data, without replicas": ("--layout", "data=2,shard=2"),
    "--layout with other axes than data, in a tournament": ("--layout", "replica=2,shard=2"),
    "--statistics recompute, in a tournament": ("--statistics", "recompute"),
    "--layout with pipeline": ("--layout", "replica=2,pipeline=2"),
    "--layout with tensor, if DiLoCo has a codec": ("--layout", "replica=2,tensor=2"),
    "--zero 1": ("--layout", "replica=2,shard=2", "--zero", "1"),
    "--elastic with hierarchical, easgd, gossip, tournament, fragments or alpha": ("--elastic",),
    **{option: ("--leases", "equal", *words) for option, words in LEASES.items()},
    "--op adasum": ("--op", "adasum"),
    "--compression": ("--compression", "bf16"),
    "--bucket": ("--bucket", "auto"),
    "--sync-batch-norm": ("--sync-batch-norm",),
    "--ema-decay": ("--ema-decay", "0.9"),
    "--precision fp16": ("--precision", "fp16"),
}

# By option, the only policy with which it is refused.
ONLY_WITH = {
    "--layout with tensor, if DiLoCo has a codec": "diloco:8:codec=int8",
    "--layout with other axes than data, in a tournament": "tournament:8",
    "--statistics recompute, in a tournament": "tournament:8",
    **dict.fromkeys(list(LEASES)[1:], "local:8"),
}


EXCLUDED_BY_SERVERS = {
    "--layout": ("--layout", "data=2"),
    "--elastic": ("--elastic",),
    "--op adasum": ("--op", "adasum"),
    "--compression": ("--compression", "bf16"),
    "--bucket": ("--bucket", "1MiB"),
    "--clip-norm": ("--clip-norm", "1"),
    "--sync-batch-norm": ("--sync-batch-norm",),
    "--ema-decay": ("--ema-decay", "0.9"),
    "--precision fp16": ("--precision", "fp16"),
    "--signals": ("--signals", "loss"),
    "--profile": ("--profile", "trace.json"),
    "--decode-group": ("--decode-group", "shared"),
    "--tune-loader": ("--tune-loader",),
    "--peers ranks": ("--cache", "c", "--peers", "ranks"),
    "--local-checkpoints": ("--local-checkpoints", "f", "--every-local", "2"),
}


def config_of(*words):
    return parse_options([*WORDS, *words], environ={}).config()


def test_the_cases_below_are_all_exclusions():
    assert EXCLUDED.keys() == {excluded.option for excluded in EXCLUSIONS}


@pytest.mark.parametrize("excluded", EXCLUSIONS, ids=lambda excluded: excluded.option)
@pytest.mark.parametrize("sync", ["easgd:8:0.9", "gossip:ring"])
def test_each_exclusion_is_refused_with_what_to_do_and_only_with_averaged_weights(excluded, sync):
    words, sync = EXCLUDED[excluded.option], ONLY_WITH.get(excluded.option, sync)
    if "--leases" in words:
        with pytest.raises(ConfigError, match="leases is 'equal', and with sync 'bsp' there are no rounds"):
            config_of(*words)
    else:
        assert not config_of(*words).averages_weights
    with pytest.raises(ConfigError) as refusal:
        config_of("--sync", sync, *words)
    message = str(refusal.value)
    assert message.startswith(f"sync is '{sync}', which does not go with {excluded.option}: ")
    assert message.endswith(f"{excluded.remedy}, or give --sync bsp")


@pytest.mark.parametrize("excluded", SERVER_EXCLUSIONS, ids=lambda excluded: excluded.option)
def test_each_exclusion_of_servers_is_refused(excluded):
    words = EXCLUDED_BY_SERVERS[excluded.option]
    with pytest.raises(ConfigError, match="does not go with") as refusal:
        config_of("--sync", "ssp:3", *words)
    assert excluded.reason in str(refusal.value)
    assert EXCLUDED_BY_SERVERS.keys() == {each.option for each in SERVER_EXCLUSIONS}


def test_a_run_with_servers_averages_no_weights():
    config = config_of("--sync", "async", "--precision", "bf16", "--optimizer", "lamb")
    assert (config.uses_servers, config.averages_weights, config.makes_own_steps) == (True, False, False)
    with pytest.raises(ConfigError, match="expected ssp:STEPS"):
        config_of("--sync", "ssp:x")


@pytest.mark.parametrize("sync", ["local:8", "postlocal:4:8", "diloco:8:delay=2,codec=int8"])
def test_an_elastic_run_averages_in_rounds_after_which_all_ranks_have_equal_weights(sync):
    assert config_of("--sync", sync, "--elastic").elastic
    for other in ("hierarchical:2,8", "tournament:8", "diloco:8:fragments=2", "diloco:8:alpha=0.5"):
        with pytest.raises(ConfigError, match="does not go with --elastic with"):
            config_of("--sync", other, "--elastic")


@pytest.mark.parametrize(
    "words",
    [
        ("--clip-norm", "1"),
        ("--micro-batch", "8"),
        ("--precision", "bf16"),
        ("--layout", "data=2"),
        ("--layout", "replica=2"),
        ("--layout", "replica=2,data=2,tensor=2"),
        ("--statistics", "recompute"),
        ("--optimizer", "lamb"),
    ],
    ids=lambda words: words[0],
)
def test_what_a_rank_does_alone_goes_with_averaged_weights(words):
    config = config_of("--sync", "diloco:32", *words)
    assert (config.averages_weights, config.makes_own_steps, config.combines_steps) == (True, True, False)


def test_one_replica_has_no_other_to_average_with():
    with pytest.raises(ConfigError, match="no other replica of the model to average with; add the number"):
        config_of("--sync", "local:8", "--layout", "replica=1,data=4")


def test_the_page_has_the_table():
    assert format_exclusions() in find_page("waiting.md").read_text(encoding="utf-8")


def test_another_form_is_refused_with_the_forms():
    for sync in ("local", "local:0", "bsp:2", "ring"):
        with pytest.raises(ConfigError, match=f"sync is '{sync}'; expected local:STEPS, .*; or bsp, with which"):
            config_of("--sync", sync)
    assert config_of().parse_sync() is None
    assert config_of("--sync", "postlocal:100:8").parse_sync().warmup_steps == 100


@pytest.mark.parametrize("leases", ["equal", "measured"])
def test_leases_are_for_rounds_after_which_all_replicas_have_equal_weights(leases):
    for sync in ("local:8", "postlocal:4:8", "diloco:8", "diloco:8:codec=int8"):
        assert config_of("--sync", sync, "--leases", leases).leases == leases
    for other in (
        "hierarchical:2,8",
        "tournament:8",
        "diloco:8:fragments=2",
        "diloco:8:delay=1",
        "diloco:8:alpha=0.5",
    ):
        with pytest.raises(ConfigError, match="does not go with --leases with"):
            config_of("--sync", other, "--leases", leases)
