"""Where DeepSeek's own plan of DeepSeek-V3 stands among the plans that a search finds for the same run."""

import pytest
from deepseek_run import CLUSTER, MODEL, PLAN

from forerun.answers.analysis.predict import predict
from forerun.answers.search.search import search
from forerun.answers.search.standing import standing, unchosen_fields


@pytest.mark.long
def test_the_plan_is_among_the_first_five_and_near_the_best():
    found = search(MODEL, CLUSTER, 2048, 4096, 15360, fixed=unchosen_fields(PLAN), keep=5, workers=1)
    place = standing(predict(MODEL, PLAN, CLUSTER), found.top(5))
    assert place.rank <= 5
    assert 0 <= place.behind < 0.03
