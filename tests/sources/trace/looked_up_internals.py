"""Run in a process of its own: prints the private parts of torch that tracing leans on and that this torch lacks."""

from importlib import import_module
from pkgutil import resolve_name

import torch

from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.torch_versions import adapters

adapters.adapt()
for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch._dynamo.convert_frame"):
    import_module(module)
adapters.adapt_compiler()
internals = read_data("torch_versions/internals.yaml")
found = 0
for area, names in internals.items():
    for name in names if area != "source" else ():
        try:
            resolve_name(name)
            found += 1
        except (ImportError, AttributeError):
            print(f"torch {torch.__version__} lacks {name} ({area})")
print(f"{found} found")
