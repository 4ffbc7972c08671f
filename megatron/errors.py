"""Errors that a user can cause and a user can mend.

Each message says what is wrong, where, which value, and what to do instead. Broken invariants of our own
are assertions; these are not.
"""


class MegatronError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(MegatronError):
    """A setting, or a combination of settings, that cannot run."""


class LaunchError(MegatronError):
    """Processes that did not come together: a missing rank, contradictory launcher variables, a dead peer."""


class LostRankError(LaunchError):
    """A rank that died, hung or was cut off while the run went on: nothing to mend, to be started again."""


class DataError(MegatronError):
    """Data that is missing, truncated or of the wrong kind."""


class CheckpointError(MegatronError):
    """A checkpoint that is missing, incomplete or does not fit the model."""


class KernelError(MegatronError):
    """A fused operator that was given what it cannot take, or a kernel that could not be launched."""


class TrainingError(MegatronError):
    """A training that cannot go on: losses or gradients that are not finite, or a loss that will not come down."""
