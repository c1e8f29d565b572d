"""Every mode of training on models in plain torch, BERT and ViT: traced with sane figures, or refused for a reason."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from mode_checks import cells, check_cell, check_documentation
from mode_table import MODELS

HERE = ("Llama", "Llama, experts", "ResNet-50", "BERT", "ViT")


@pytest.mark.parametrize(("model", "mode"), cells(HERE))
def test_the_cell_is_what_the_table_says(model, mode):
    check_cell(model, mode)


def test_the_documentation_has_the_table():
    check_documentation()
    assert set(HERE) < set(MODELS)
