"""Options that make a predicted step the update of GRPO or PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from forerun.answers.analysis.post_training import PostTraining
from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_model


@dataclass(frozen=True)
class PostTrainingOptions:
    """Holds the options for generation and scoring of sequences before the update."""

    generated_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help=(
                "Tokens/s that an inference engine generates on a GPU. This adds the other stages of a GRPO"
                " or PPO step to the update (use --reference for the reference model)."
            ),
        ),
    ] = None
    generated_share: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of the tokens that are generated; the others are prompts (1)."),
    ] = None
    generation_gib: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="GPU memory that the inference engine needs while it generates (0)."),
    ] = None
    old_scores: Annotated[
        bool | None,
        typer.Option(
            "--old-scores/--no-old-scores", help="Score the generated tokens with the model before its update (on)."
        ),
    ] = None
    critic: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Critic model of PPO, trained under the same plan.")
    ] = None

    def around(self) -> PostTraining | None:
        """Returns the stages around the update, None if there are none. Raises ForerunError for wrong values."""
        own = {name: getattr(self, name) for name in ("generated_share", "generation_gib", "old_scores")}
        given = {name: value for name, value in own.items() if value is not None}
        if self.generated_tokens_per_s is None:
            for name in (*given, *(["critic"] if self.critic else [])):
                raise ForerunError(f"--{name.replace('_', '-')}: give --generated-tokens-per-s too")
            return None
        critic = None if self.critic is None else load_model(self.critic)
        return PostTraining(self.generated_tokens_per_s, critic=critic, **given)
