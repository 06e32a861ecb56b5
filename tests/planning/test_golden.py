"""Answers of the planners that stay equal; `golden.json` was written before they were one room."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from datasvc.planning.cache import Rates
from datasvc.planning.candidates import Choices
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.cost import Prices
from datasvc.planning.layout_step import PlannedWork
from datasvc.planning.prediction import predict
from datasvc.planning.ranking import rank_layouts
from datasvc.planning.run_plan import PlanOptions, plan_run
from tests.planning.examples import ADAM, EXAMPLE, SMALL_GPT, TIMES

CLUSTER = Cluster(2, Link(1e9, 1e-5), 2, Link(1e10, 1e-6), message_s=1e-5)


def answers():
    plan = plan_run(
        np.full(40, 100),
        np.arange(40) * 1000 + 50_000,
        PlanOptions(
            budget_bytes=1_500_000,
            nodes=2,
            shuffle="windowed",
            batch_size=4,
            rates=Rates(100.0, 1e6, 1e7),
            prices=Prices(currency="EUR", requests_per_million=1.5, egress_per_gb=0.25, peers_per_gb=0.125),
            epochs=3,
        ),
    )
    work = PlannedWork(SMALL_GPT, TIMES, ADAM, "bf16", 8, memory_bytes=8e6)
    return {
        "cache": plan.to_dict(),
        "layouts": rank_layouts(work, CLUSTER, Choices()).to_dict(),
        "prediction": dataclasses.asdict(predict(EXAMPLE, CLUSTER)),
    }


def nested(value):
    """Return approximations of the numbers in JSON values; `approx` itself takes no nested ones."""
    if isinstance(value, dict):
        return {name: nested(each) for name, each in value.items()}
    if isinstance(value, list):
        return [nested(each) for each in value]
    return pytest.approx(value, rel=1e-12) if isinstance(value, float) else value


def test_the_answers_are_those_of_the_golden_file():
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    assert json.loads(json.dumps(answers())) == nested(golden)
