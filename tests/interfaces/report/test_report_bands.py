"""Bands are printed beside their figures, and a doubtful fit is called so."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report import bands
from forerun.interfaces.report.console import print_prediction
from forerun.interfaces.report.page_sections import figures
from forerun.interfaces.report.records import prediction_record


@pytest.fixture(scope="module")
def found() -> Prediction:
    return predict(load_model("llama-3.1-8b"), Plan(seq_len=2048, dp_shard=64), load_cluster("h100-sxm"))


def printed(prediction: Prediction) -> str:
    out = io.StringIO()
    print_prediction(Console(file=out, width=120), prediction, None, explain=False)
    return out.getvalue()


def test_the_console_prints_bands(found: Prediction) -> None:
    text = printed(found)
    number = r"[\d,.]+%?"
    for name in ("step time", "tokens/s/GPU", "MFU, HFU"):
        assert re.search(rf"{name} +{number}(?: m?s)? \(80 %: {number}(?: m?s)? to {number}(?: m?s)?\)", text), text
    assert re.search(r"[\d.]+ reserved \(80 %: [\d.]+ to [\d.]+\) of 79.2: fits\n", text), text


def test_rates_are_slow_where_the_step_is_long(found: Prediction) -> None:
    shown = bands.rate_in_band(found, found.tokens_per_s_per_gpu)
    low, high = re.findall(r"[\d,]+(?= to|\)$)", shown)
    assert int(low.replace(",", "")) < (found.tokens_per_s_per_gpu or 0) < int(high.replace(",", ""))


def test_what_is_unknown_has_no_band(found: Prediction) -> None:
    unknown = replace(found, mfu=None, tokens_per_s_per_gpu=None)
    assert bands.mfu(unknown) == bands.rate_in_band(unknown, None) == "unknown"


def test_a_doubtful_fit_is_called_so(found: Prediction) -> None:
    assert bands.fits(found) == "fits"
    assert bands.fits(replace(found, fit_in_doubt=True)) == "fits, but within the error of the estimate"
    refused = bands.fits(replace(found, fits=False, fit_in_doubt=True))
    assert refused == "does not fit, but within the error of the estimate"


def test_pages_and_records_have_bands(found: Prediction) -> None:
    (name, value, remark), *_ = figures(found).entries
    assert (name, value) == ("step time", bands.step_time(found).split(" (")[0])
    assert "80 %: " in remark
    record = prediction_record(found)
    assert record["step_time_low_s"] < record["step_time_s"] < record["step_time_high_s"]
    assert record["peak_reserved_low_gib"] <= record["peak_reserved_gib"] <= record["peak_reserved_high_gib"]
    assert record["fit_in_doubt"] is False
