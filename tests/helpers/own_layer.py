"""The layer of docs/extending.md in a model, declared as a test wants it."""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from megatron.parallel.sharding import attach, sharding_of
from tests.helpers.launching import ROOT


def pieces_of_the_page() -> dict[str, Any]:
    """What the code of the page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    return found


def put(patch: Any, where: Any, declared: Mapping[str, bool], forward: Any = None) -> None:
    """`where`.build_chunks makes models with the layer; parameters are declared by the end of their names, and
    `forward` takes the place of the layer's own."""
    plain, page = where.build_chunks, pieces_of_the_page()

    def build(config: Any, topology: Any, context: Any = None) -> torch.nn.ModuleDict:
        chunks = page["with_heads"](plain(config, topology, context))
        for p in chunks.parameters():
            own = sharding_of(p)
            for end, partial in declared.items():
                if own.name.startswith("heads.") and own.name.endswith(end):
                    attach(p, dataclasses.replace(own, partial_gradient=partial), topology.tensor.size)
        return chunks

    if forward is not None:
        page["Heads"].forward = forward
    patch.setattr(where, "build_chunks", build)
