"""What was decided by measuring, kept between processes: in the cache folder, and in a lock file
while one is in use (lock.py). A record is a JSON object under a key that hashes all that the
decision depends on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from onchip.backends.cache import cache_folder, folder_of, read_json, store
from onchip.errors import CacheError

Record = dict[str, Any]


class Book(Protocol):
    """Stands in front of the cache while one specialisation is decided.

    load      the record to take; None: there is none
    describe  called with the operators of a kind of region, by the key of its record
    note      called with each record that was loaded or stored, by its key
    measured  called before something is measured; raises where nothing may be
    """

    def load(self, key: str, cached: Record | None) -> Record | None: ...
    def describe(self, key: str, operators: str) -> None: ...
    def note(self, key: str, record: Record) -> None: ...
    def measured(self, what: str) -> None: ...


_book: ContextVar[Book | None] = ContextVar("book", default=None)


@contextmanager
def kept_in(book: Book | None) -> Iterator[None]:
    """Inside, in this thread, records go through the book."""
    token = _book.set(book)
    try:
        yield
    finally:
        _book.reset(token)


def about_to_measure(what: str) -> None:
    """Must be called before a decision is made by measuring `what`. Raises LockError where a lock
    file has decided everything."""
    book = _book.get()
    if book is not None:
        book.measured(what)


def describe(key: str, operators: str) -> None:
    """What the record of that key is about."""
    book = _book.get()
    if book is not None:
        book.describe(key, operators)


def record_path(key: str) -> Path:
    return cache_folder() / "choices" / f"{key}.json"


def load_record(key: str) -> Record | None:
    """What was stored under `key`; None if there is nothing or it can't be read."""
    book, found = _book.get(), read_json(record_path(key))
    if book is None:
        return found
    found = book.load(key, found)
    if found is not None:
        book.note(key, found)
    return found


def store_record(key: str, record: Record, lasting: bool = True) -> None:
    """Written whole or not at all; a cache that can't be written only costs time later. Not
    lasting: for this program's lock file alone."""
    if lasting:
        with suppress(CacheError):
            store(folder_of("choices") / f"{key}.json", json.dumps(record).encode())
    book = _book.get()
    if book is not None:
        book.note(key, record)
