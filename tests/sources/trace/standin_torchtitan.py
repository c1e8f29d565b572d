"""A package with the extension points of torchtitan 0.2 that a trace uses, and a trainer of one small model."""

from __future__ import annotations

import textwrap
from pathlib import Path

_FILES = {
    "torchtitan/__init__.py": '__version__ = "{version}"',
    "torchtitan/components/__init__.py": "",
    "torchtitan/components/dataloader.py": "class BaseDataLoader: pass",
    "torchtitan/components/tokenizer.py": """
        class BaseTokenizer:
            def __init__(self):
                self.eos_id = None
        """,
    "torchtitan/config/__init__.py": """
        import sys
        from dataclasses import dataclass, field

        @dataclass
        class Model:
            name: str = "llama3"
            flavor: str = "debugmodel"

        @dataclass
        class Training:
            local_batch_size: int = 8
            seq_len: int = 64
            steps: int = 100
            gc_freq: int = 50

        @dataclass
        class Checkpoint:
            enable: bool = True
            interval: int = 500
            async_mode: str = "disabled"

        @dataclass
        class Profiling:
            enable_profiling: bool = False
            profile_freq: int = 10
            profiler_active: int = 1
            enable_memory_snapshot: bool = False

        @dataclass
        class Metrics:
            log_freq: int = 10

        @dataclass
        class Compile:
            enable: bool = False

        @dataclass
        class JobConfig:
            model: Model = field(default_factory=Model)
            training: Training = field(default_factory=Training)
            checkpoint: Checkpoint = field(default_factory=Checkpoint)
            compile: Compile = field(default_factory=Compile)
            profiling: Profiling = field(default_factory=Profiling)
            metrics: Metrics = field(default_factory=Metrics)

        class ConfigManager:
            def parse_args(self, args):
                config = JobConfig()
                for one in args:
                    name, _, value = one.removeprefix("--").partition("=")
                    section, key = name.split(".")
                    at = getattr(config, section)
                    if value == "":
                        setattr(at, key.removeprefix("no_"), not key.startswith("no_"))
                    elif isinstance(getattr(at, key), int) and not value.isdigit():
                        print(f"| {value} is not a number |", file=sys.stderr)
                        raise SystemExit(2)
                    else:
                        setattr(at, key, type(getattr(at, key))(value))
                return config
        """,
    "torchtitan/protocols/__init__.py": "",
    "torchtitan/protocols/train_spec.py": """
        from dataclasses import dataclass
        from typing import Any

        @dataclass
        class Args:
            vocab_size: int

        @dataclass
        class TrainSpec:
            model_args: Any
            build_dataloader_fn: Any
            build_tokenizer_fn: Any
            build_validator_fn: Any

        _extra = {}

        def get_train_spec(name):
            if name != "llama3":
                raise ValueError(f"TrainSpec {name} is not registered.")
            def unread(*_, **__):
                raise RuntimeError("data was to be read")
            return _extra.get(name) or TrainSpec({"debugmodel": Args(512), "8B": Args(1000)}, unread, unread, unread)

        def register_train_spec(name, spec):
            _extra[name] = spec
        """,
    "torchtitan/train.py": """
        import torch
        import torch.distributed as dist
        from torch import nn
        from torchtitan.protocols.train_spec import get_train_spec

        class Trainer:
            def __init__(self, config):
                assert not config.checkpoint.enable and not config.profiling.enable_profiling
                self.config = config
                dist.init_process_group("nccl")
                spec = get_train_spec(config.model.name)
                vocabulary = spec.model_args[config.model.flavor].vocab_size
                tokenizer = spec.build_tokenizer_fn(config)
                assert tokenizer.get_vocab_size() == vocabulary and tokenizer.eos_id == vocabulary - 1
                self.loader = spec.build_dataloader_fn(
                    dp_world_size=8, dp_rank=0, tokenizer=tokenizer, job_config=config
                )
                self.model = nn.Sequential(nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary)).cuda()
                self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

            def train_step(self, batches):
                inputs, labels = next(batches)
                logits = self.model(inputs["input"].cuda())
                nn.functional.cross_entropy(logits.flatten(0, 1), labels.cuda().flatten()).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                dist.all_reduce(torch.ones(7, device="cuda"))  # part of the step, though it comes after the optimizer

            def train(self):
                batches = iter(self.loader)
                for _ in range(self.config.training.steps):
                    dist.broadcast(torch.ones(5, device="cuda"), 0)
                    self.train_step(batches)
        """,
}


def install(folder: Path, version: str = "0.2.2") -> None:
    """Put the package into `folder`, which is then to be on Python's path."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).replace("{version}", version))
    info = folder / f"torchtitan-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")
