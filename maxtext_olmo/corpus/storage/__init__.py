"""Storage backends: the `Storage` protocol and its implementations."""

from maxtext_olmo.corpus.storage.base import Pinned
from maxtext_olmo.corpus.storage.base import Storage
from maxtext_olmo.corpus.storage.base import reason
from maxtext_olmo.corpus.storage.local import LocalStorage

__all__ = ["LocalStorage", "Pinned", "Storage", "reason"]
