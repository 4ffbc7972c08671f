"""Configuration as frozen dataclasses.

They are created from a command line, keyword arguments or a saved dictionary.

>>> config = Config.create(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32)
>>> config.model.ffn_hidden_size, config.origin("ffn_hidden_size")
(256, 'derived from hidden-size')
"""

from megatron.config.command_line import command_line_of, parse_args
from megatron.config.config import Config
from megatron.config.help_text import render_config, render_help
from megatron.config.io import CheckpointConfig, DataConfig, LoggingConfig, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import EngineConfig, ParallelConfig, RecomputeConfig
from megatron.config.presets import PRESETS
from megatron.config.training import (
    BatchConfig,
    KernelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)

__all__ = [
    "PRESETS",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "KernelConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "command_line_of",
    "parse_args",
    "render_config",
    "render_help",
]
