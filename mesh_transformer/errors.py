"""Exceptions that users meet, and the exit codes of the scripts.

Every message names the thing, what was found, what was expected and what to do; scripts print it in one line,
without a traceback, and exit with `EXIT_USER`.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_NONFINITE = 3
EXIT_INTERRUPTED = 75
EXIT_KEYBOARD = 130  # what shells report for a program that Ctrl-C ended


class MeshTransformerError(Exception):
    """Base of everything that this project raises on purpose."""


class ConfigError(MeshTransformerError, ValueError):
    """A config key is unknown, missing, of the wrong type, out of range, or contradicts another."""


class DeviceError(MeshTransformerError, ValueError):
    """The devices found cannot carry the mesh or platform that was asked for."""


class DataError(MeshTransformerError, ValueError):
    """An index, record file, record or tokenizer is not what the config promises."""


class StorageError(MeshTransformerError, ValueError):
    """A path cannot be read, written or listed; chained to the operating system's or cloud's own error."""


class CheckpointError(MeshTransformerError, ValueError):
    """A checkpoint is missing, incomplete, corrupt, or belongs to another model or run."""


class EvaluationError(MeshTransformerError, ValueError):
    """A task, or what evaluating it needs, is missing or cannot be used."""


class ClusterError(MeshTransformerError, ValueError):
    """What a cluster needs is missing, or does not fit together."""


class NonFiniteError(MeshTransformerError):
    """Too many steps in a row had a gradient that is not finite."""
