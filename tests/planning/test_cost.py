"""What a plan says that traffic costs, by prices that are made up."""

import json
from dataclasses import replace

import numpy as np
import pytest

from datasvc.cache.sources.origin_source import PART_BYTES
from datasvc.errors import ConfigError
from datasvc.order import OrderConfig
from datasvc.planning.cache import Rates, Workload, forecast
from datasvc.planning.cost import Prices, count_requests, forecast_cost
from datasvc.planning.run_plan import PlanOptions, plan_run
from tests.cli.command import run

MIB = 1 << 20
COUNTS = np.full(100, 10)
SIZES = np.full(100, 40 * MIB)
PRICES = Prices(currency="coins", requests_per_million=3.0, egress_per_gb=0.5, peers_per_gb=0.25)


def forecast_of(nodes=4, share=0.5):
    workload = Workload(OrderConfig(shuffle="windowed", block=10), batch_size=4, nodes=nodes)
    return forecast(COUNTS, SIZES, int(SIZES.sum() * share), workload, Rates())


def test_a_shard_is_read_in_parts_and_a_large_one_in_longer_requests():
    assert count_requests(np.array([0])) == 0
    assert count_requests(np.array([1])) == count_requests(np.array([PART_BYTES])) == 1
    assert count_requests(np.array([PART_BYTES + 1])) == 2
    assert count_requests(np.array([16 * PART_BYTES])) == 16
    assert 16 < count_requests(np.array([64 * PART_BYTES])) < 64
    assert count_requests(np.array([PART_BYTES, 5 * PART_BYTES])) == 6


def test_the_cost_is_that_of_the_requests_and_bytes_of_the_forecast():
    found = forecast_of()
    cost = forecast_cost(found, SIZES, PRICES, epochs=3)
    assert cost.first_epoch.num_requests == 100 * 10  # 40 MiB in parts of 4
    for epoch, priced in ((found.first_epoch, cost.first_epoch), (found.later_epochs, cost.later_epochs)):
        assert priced.num_requests == pytest.approx(epoch.origin_bytes / (4 * MIB), abs=1)
        assert priced.requests == pytest.approx(priced.num_requests * 3e-6)
        assert priced.egress == pytest.approx(epoch.origin_bytes / 1e9 * 0.5)
        assert priced.peers == pytest.approx(epoch.peer_bytes / 1e9 * 0.25)
        assert priced.total == priced.requests + priced.egress + priced.peers
    assert found.first_epoch.peer_bytes
    assert cost.run.total == pytest.approx(cost.first_epoch.total + 2 * cost.later_epochs.total)
    assert cost.run.num_requests == cost.first_epoch.num_requests + 2 * cost.later_epochs.num_requests


def test_a_run_of_one_epoch_costs_its_first_epoch_and_one_without_epochs_has_no_total():
    found = forecast_of(nodes=1)
    assert forecast_cost(found, SIZES, PRICES, epochs=1).run == forecast_cost(found, SIZES, PRICES).first_epoch
    assert forecast_cost(found, SIZES, PRICES).run is None
    with pytest.raises(ConfigError, match="epochs is 0; expected 1 or more"):
        forecast_cost(found, SIZES, PRICES, epochs=0)


def test_a_plan_has_a_cost_if_it_has_prices():
    options = PlanOptions(budget_bytes=int(SIZES.sum()), batch_size=4)
    assert "cost" not in plan_run(COUNTS, SIZES, options).to_dict()
    planned = plan_run(COUNTS, SIZES, replace(options, prices=PRICES, epochs=2)).to_dict()["cost"]
    assert (planned["currency"], planned["epochs"]) == ("coins", 2)
    assert planned["later_epochs"]["total"] == 0  # the data fits into the cache
    assert planned["run"] == planned["first_epoch"]


FILE = """
currency = "coins"
[origin]
requests_per_million = 3
egress_per_gb = 0.5
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prices.toml"


def test_prices_are_read_from_a_file(file):
    file.write_text(FILE)
    assert Prices.read(file) == replace(PRICES, peers_per_gb=0.0)
    file.write_text(FILE + "[peers]\negress_per_gb = 0.25\n")
    assert Prices.read(file) == PRICES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"no table \[origin\]; expected currency"),
        ("origin = 3", r"no table \[origin\]"),
        (FILE + "[peers]\n", r"egress_per_gb in \[peers\] is missing"),
        (FILE.replace("currency", "curency"), "it has an unknown key 'curency'; expected currency, origin, peers"),
        (FILE.replace('currency = "coins"', ""), "no currency"),
        (FILE.replace("egress_per_gb", "egress"), r"\[origin\] has an unknown key 'egress'; expected requests_per"),
        (FILE.replace("0.5", "-0.5"), "is -0.5; expected a price, 0 or more"),
        (FILE.replace("0.5", "nan"), "is nan; expected a price"),
        (FILE.replace("0.5", "true"), "is True; expected a price"),
        (FILE.replace("0.5", '"0.5"'), "is '0.5'; expected a price"),
        ("[origin", "is not a valid TOML file"),
    ],
)
def test_a_file_that_is_not_as_documented_is_refused_with_its_name(file, content, message):
    file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Prices.read(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(file):
    with pytest.raises(ConfigError, match=r"cannot read .*prices.toml: No such file"):
        Prices.read(file)


def test_the_command_prints_the_cost_as_lines_and_as_json(digits, file):
    file.write_text(FILE)
    words = ["plan", "cache", "digits@1", "--budget", "100MB", "--repo", digits.repository.url, "--prices", str(file)]
    text = run(*words, "--epochs", "5").stdout
    assert "cost of the first epoch: 0.0011 coins: at most 8 requests 2.4e-05, bytes from the origin 0.00108" in text
    assert "cost of 5 epochs: " in text
    cost = json.loads(run(*words, "--json").stdout)["cost"]
    assert (cost["first_epoch"]["num_requests"], cost["epochs"]) == (8, None)
    refused = run(*words[:-2], "--epochs", "5")
    assert refused.returncode == 2
    assert "--epochs is for the cost of a run" in refused.stderr
