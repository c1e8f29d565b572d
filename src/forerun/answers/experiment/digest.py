"""digest: a name for all inputs of a simulation. Equal inputs have equal digests in every process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

from forerun.answers.experiment.request import Request
from forerun.common.content import content
from forerun.common.version import __version__
from forerun.describe.stacks.catalog import own_stack

_FORMAT = 1
"""increased when the meaning of a point's figures changes"""
_SHOWN_ONLY = ("name", "config", "given", "echo", "thresholds")
"""fields of a Request that change no simulation"""


def digest(what: str, request: Request, *more: object) -> str:
    """Returns 64 hexadecimal digits for a simulation of `request`, which is called `what` and also depends on `more`.

    They depend on the version of Forerun and on the file of every class or function of the user.
    """
    parts = [getattr(request, field.name) for field in fields(request) if field.name not in _SHOWN_ONLY]
    own = own_stack(request.setup.plan.stack)
    more = more if own is None else (*more, own)
    text = json.dumps([_FORMAT, __version__, what, content(parts), content(more)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
