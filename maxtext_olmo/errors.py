"""What can go wrong, by kind.

Each error says what happened, where, what was expected and found, and what to do. Each takes one
message, so that it survives pickling on its way out of a worker process.
"""


class MaxtextOlmoError(Exception):
  """Everything this library raises on purpose."""


class CorpusError(MaxtextOlmoError, ValueError):
  """The token files, a manifest or an index are not what they should be."""


class MissingFileError(CorpusError, FileNotFoundError):
  """A file or directory of the corpus is not there."""


class WriteError(MaxtextOlmoError, OSError):
  """A file cannot be written: no space, no permission, or something else has its name."""


class WorkerError(MaxtextOlmoError, RuntimeError):
  """A worker process that prepares batches has died."""


class OrderError(MaxtextOlmoError, IndexError):
  """A position, place or instance lies outside the stream."""


class ConfigError(MaxtextOlmoError, ValueError):
  """The configuration is invalid; nothing has been read yet."""


class ResumeError(MaxtextOlmoError, ValueError):
  """A checkpoint or state does not belong to this stream."""
