"""Storage backends: the `Storage` protocol and its implementations."""

from maxtext_olmo.corpus.storage.base import Pinned
from maxtext_olmo.corpus.storage.base import Storage
from maxtext_olmo.corpus.storage.base import reason
from maxtext_olmo.corpus.storage.local import LocalStorage
from maxtext_olmo.corpus.storage.router import StorageRouter
from maxtext_olmo.corpus.storage.router import narrowed
from maxtext_olmo.corpus.storage.router import open_storage

__all__ = [
    "LocalStorage",
    "Pinned",
    "Storage",
    "StorageRouter",
    "narrowed",
    "open_storage",
    "reason",
]
