"""As test_mode_table, for the decoders of transformers. A file of its own, so that two processes share the table."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from mode_checks import cells, check_cell
from mode_table import MODELS

HERE = ("GPT-2", "Qwen3", "Mixtral", "DeepSeek-V3")


@pytest.mark.parametrize(("model", "mode"), cells(HERE))
def test_the_cell_is_what_the_table_says(model, mode):
    assert model in MODELS
    check_cell(model, mode)
