"""Models of the Hugging Face hub: in the local cache of its tools, or downloaded where a person asks for it.

The cache is the folder `hub` of HF_HOME, or HF_HUB_CACHE. It holds `models--ORG--NAME/snapshots/COMMIT/config.json`,
and the commit of a branch in `refs/main`.
"""

from __future__ import annotations

import difflib
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError
from forerun.common.files import make_folder, whole_file

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ENDPOINT = "https://huggingface.co"
_TIMEOUT_S = 30
_MOST_BYTES = 10**7


def is_hub_name(name: str) -> bool:
    """Returns whether `name` is written as the hub's names are: an organisation, a slash, a model."""
    return _NAME.fullmatch(name) is not None


def cached_config(name: str) -> Path | None:
    """Returns the config.json of a model in the cache, that of its main branch first; None if there is none."""
    folder = _folder(name)
    main = folder / "refs" / "main"
    if main.is_file():
        config = folder / "snapshots" / read_text(main).strip() / "config.json"
        if config.is_file():
            return config
    found = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def cached_names() -> list[str]:
    """Returns the names of the models whose config.json is in the cache."""
    folders = hub_folder().glob("models--*--*")
    names = (folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    return sorted(name for name in names if is_hub_name(name) and cached_config(name) is not None)


def download_config(name: str) -> Path:
    """Downloads the config.json of a model's main branch into the cache, and returns its path.

    Raises ForerunError if `name` is none of the hub's, if the hub can't be reached, or if it has no such public file.
    """
    if not is_hub_name(name):
        raise ForerunError(f"{name}: can't be downloaded: a model of the Hugging Face hub is written org/model")
    url = f"{os.environ.get('HF_ENDPOINT', _ENDPOINT)}/{name}/resolve/main/config.json"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            content, commit = answer.read(_MOST_BYTES), answer.headers.get("X-Repo-Commit", "main")
    except urllib.error.HTTPError as error:
        raise ForerunError(f"{url}: can't be downloaded: {_refusal(name, error)}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ForerunError(f"{url}: can't be downloaded: {error}") from None
    folder = make_folder(_folder(name) / "snapshots" / Path(commit).name)
    with whole_file(folder / "config.json") as file:
        file.write(content)
    return folder / "config.json"


def _refusal(name: str, error: urllib.error.HTTPError) -> str:
    """Says why the hub does not give a file, and what a user who may read a gated model does."""
    said = f"HTTP {error.code} {error.reason}"
    if error.code not in (401, 403):
        return said
    return f"{said}; no such model, or one that needs a login: run `hf auth login` and `hf download {name} config.json`"


def absent(name: str, presets: Sequence[str]) -> ForerunError:
    """Returns the error to raise for a hub's name that the cache does not have, with the preset of nearly that name."""
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), presets, 1, 0.8)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ForerunError(
        f"{name}: not in the hub cache {hub_folder()}, and nothing is downloaded unasked; run"
        f" `forerun models {name} --download`{hint}"
    )


def hub_folder() -> Path:
    """Returns the folder of the Hugging Face hub cache, which need not be there."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def _folder(name: str) -> Path:
    return hub_folder() / f"models--{name.replace('/', '--')}"
