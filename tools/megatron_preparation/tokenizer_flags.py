"""Flags of tools that choose a tokenizer: those of pretrain_gpt.py."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.config.io import TokenizerConfig
from megatron.config.option import MOST_WIDTH, integer, options_of


def add_tokenizer_flags(group: argparse._ArgumentGroup, *, required: bool = False) -> None:
    """Add the flags of TokenizerConfig and --vocab-size; `required` means that of the type."""
    for option in options_of(TokenizerConfig):
        choices = "" if option.choices is None else f": {', '.join(map(str, option.choices))}"
        group.add_argument(
            *option.flags,
            dest=option.name,
            type=integer(0, MOST_WIDTH) if option.kind is int else str,
            nargs="+" if option.many else None,
            metavar=option.metavar or ("N" if option.kind is int else "NAME"),
            required=required and option.name == "tokenizer_type",
            help=option.help.removesuffix(".") + choices,
        )
    group.add_argument(
        "--vocab-size",
        type=integer(),
        metavar="N",
        help="number of ids of NullTokenizer, or of a vocabulary that no file describes",
    )


def tokenizer_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of build_tokenizer that the flags give."""
    names = (*(option.name for option in options_of(TokenizerConfig)), "vocab_size")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
