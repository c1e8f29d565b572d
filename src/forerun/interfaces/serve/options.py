"""Lists the choices of the page's form: models, clusters, fields of a plan with their help, tools, examples."""

from __future__ import annotations

from functools import cache
from typing import Any

from forerun.answers.experiment.description.read import preset_names
from forerun.answers.goodput.examples import example_names
from forerun.common.version import __version__
from forerun.describe.cluster.catalog import cluster_table
from forerun.describe.model.catalog import model_names
from forerun.describe.model.hub import cached_names
from forerun.describe.model.inputs import MOST_IMAGES, MOST_MTP_MODULES
from forerun.describe.plan.fields import FOLLOWING, MEANINGS, choices, is_flag
from forerun.describe.stacks.catalog import stack_names
from forerun.interfaces.report.launch.tools import TOOLS
from forerun.interfaces.serve.question import MOST_GPUS, MOST_SEQUENCES, MOST_TOKENS, Question

FIRST = (
    *("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "zero_stage", "micro_batch", "activation_checkpointing"),
    *("compile", "precision", "stack", "pp_schedule"),
)
"""fields that the form shows at once; the others stand under *more fields*"""
EXAMPLE = Question(model="llama-3.1-8b", cluster="h100-sxm", gpus=64, seq_len=8192, global_batch=256)
"""the question of --demo, and of a page that is opened for the first time"""


def options_record() -> dict[str, Any]:
    """Returns everything that the form offers; models of the hub's cache are those that are there now."""
    return {**_lasting_options(), "cached_models": cached_names()}


@cache
def _lasting_options() -> dict[str, Any]:
    """Returns the choices of the form that stay the same while the server runs."""
    names = [*FIRST, *(name for name in MEANINGS if name not in FIRST and name not in FOLLOWING)]
    return {
        "version": __version__,
        "models": model_names(),
        "clusters": [
            {
                "name": each.name,
                "about": f"{each.gpus_per_node} GPUs a node, {each.memory_gib:.0f} GiB",
                "price": each.price_per_gpu_hour,
                "memory_gib": each.memory_gib,
            }
            for each in cluster_table()
        ],
        "fields": [_field(name) for name in names],
        "tools": list(TOOLS),
        "experiments": list(preset_names()),
        "runs": example_names(),
        "limits": {
            "gpus": MOST_GPUS,
            "seq_len": MOST_TOKENS,
            "global_batch": MOST_SEQUENCES,
            "images": MOST_IMAGES,
            "encoder_seq_len": MOST_TOKENS,
            "mtp": MOST_MTP_MODULES,
        },
        "example": EXAMPLE.model_dump(),
    }


def _field(name: str) -> dict[str, Any]:
    """Returns a field of a plan: its help, its values where they are known, whether the form shows it at once."""
    values = ["true", "false"] if is_flag(name) else [str(each) for each in choices(name)]
    help_of = MEANINGS[name]
    if name == "stack":  # the page opens no file of a user
        values, help_of = list(stack_names()), "training framework"
    return {"name": name, "help": help_of, "values": values, "first": name in FIRST}
