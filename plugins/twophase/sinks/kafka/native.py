"""A producer that takes whole Arrow columns: librdkafka's call for batches, without a Python object per record.

The library is the one inside confluent-kafka, whose own producer has no call for Arrow; a promotion uses that one where
this cannot do it (`takes`). Both have the same settings, methods and errors, so
`transaction.py` treats them alike. Only what librdkafka's header declares is used, and only through functions: the one
structure that is filled here, `rd_kafka_message_t`, is part of its interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from twophase.sinks.kafka.records import RecordColumns

#: The major version of librdkafka whose interface this is.
_MAJOR = 2
_PRODUCER, _CONF_OK = 0, 0
_COPY = 0x2
_ANY_PARTITION = -1
_PURGE_ALL = 0x1 | 0x2
#: How many records may wait in the client for each partition, and in all. A batch of 1 MB takes that many of 100 bytes;
#: with many more than are being sent, the library works on memory that has left the processor's caches: twice its CPU.
EACH, MOST = 10_000, 100_000
_TEXT = 512
#: Settings that are Python functions.
_FUNCTIONS = ("error_cb", "logger", "on_delivery")
#: librdkafka's numbers of "invalid argument or configuration" and "local: queue full".
_INVALID, _FULL = -186, -184
#: An address that may be read, for values that are there and empty.
_EMPTY = ctypes.create_string_buffer(1)

_Delivered = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_Errors = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

_P, _I, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
#: Function → what it returns, what it takes.
_FUNCTIONS_OF_C: Mapping[str, tuple[Any, ...]] = {
    "rd_kafka_version": (_I,),
    "rd_kafka_conf_new": (_P,),
    "rd_kafka_conf_destroy": (None, _P),
    "rd_kafka_conf_set": (_I, _P, _S, _S, _S, ctypes.c_size_t),
    "rd_kafka_conf_set_dr_msg_cb": (None, _P, _Delivered),
    "rd_kafka_conf_set_error_cb": (None, _P, _Errors),
    "rd_kafka_new": (_P, _I, _P, _S, ctypes.c_size_t),
    "rd_kafka_destroy": (None, _P),
    "rd_kafka_metadata": (_I, _P, _I, _P, _P, _I),
    "rd_kafka_metadata_destroy": (None, _P),
    "rd_kafka_topic_new": (_P, _P, _S, _P),
    "rd_kafka_topic_destroy": (None, _P),
    "rd_kafka_produce": (_I, _P, ctypes.c_int32, _I, _S, ctypes.c_size_t, _S, ctypes.c_size_t, _P),
    "rd_kafka_produce_batch": (_I, _P, ctypes.c_int32, _I, _P, _I),
    "rd_kafka_outq_len": (_I, _P),
    "rd_kafka_poll": (_I, _P, _I),
    "rd_kafka_flush": (_I, _P, _I),
    "rd_kafka_purge": (_I, _P, _I),
    "rd_kafka_init_transactions": (_P, _P, _I),
    "rd_kafka_begin_transaction": (_P, _P),
    "rd_kafka_commit_transaction": (_P, _P, _I),
    "rd_kafka_abort_transaction": (_P, _P, _I),
    "rd_kafka_fatal_error": (_I, _P, _S, ctypes.c_size_t),
    "rd_kafka_last_error": (_I,),
    "rd_kafka_error_code": (_I, _P),
    "rd_kafka_error_string": (_S, _P),
    "rd_kafka_error_is_fatal": (_I, _P),
    "rd_kafka_error_is_retriable": (_I, _P),
    "rd_kafka_error_txn_requires_abort": (_I, _P),
    "rd_kafka_error_destroy": (None, _P),
}


class _Message(ctypes.Structure):
    """`rd_kafka_message_t`."""

    _fields_ = (
        ("err", ctypes.c_int),
        ("rkt", _P),
        ("partition", ctypes.c_int32),
        ("payload", _P),
        ("len", ctypes.c_size_t),
        ("key", _P),
        ("key_len", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", _P),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the librdkafka that confluent-kafka has loaded; None if it cannot be called from here."""
    from confluent_kafka import cimpl

    try:
        import numpy as np  # noqa: F401 - batches are laid out by it
    except ImportError:
        return None
    found = ctypes.CDLL(cimpl.__file__)  # its symbols are found, too: it is linked to them
    try:
        for name, (returned, *taken) in _FUNCTIONS_OF_C.items():
            function = getattr(found, name)
            function.restype, function.argtypes = returned, taken
    except AttributeError:
        return None
    return found if found.rd_kafka_version() >> 24 == _MAJOR else None


def takes(columns: RecordColumns, ours: list[tuple[str, bytes | None]]) -> bool:
    """Return True if records of this shape can be sent by the call for batches.

    It knows of no headers and no times. Given a partition of a topic that the library has not asked about yet, it adds
    no partition at all to the transaction, which then never ends.
    """
    return not (ours or columns.headers or columns.timestamp or columns.partition) and library() is not None


class NativeProducer:
    """A handle of librdkafka; its methods are those of confluent-kafka's `Producer`, and `produce_columns`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Make the handle; like confluent-kafka's, it tells errors to `error_cb` and `on_delivery`."""
        found = library()
        if found is None:
            msg = "librdkafka cannot be called"
            raise RuntimeError(msg)
        self._c = found
        # The library keeps their addresses as long as the handle lives; they do not keep this object alive.
        self._callbacks = _callbacks(settings["on_delivery"], settings["error_cb"])
        self._topics: dict[str, int] = {}
        self._handle: int | None = self._new(settings)

    def _new(self, settings: Mapping[str, Any]) -> int:
        conf, why = self._c.rd_kafka_conf_new(), ctypes.create_string_buffer(_TEXT)
        for name, value in settings.items():
            if name in _FUNCTIONS:
                continue
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if self._c.rd_kafka_conf_set(conf, name.encode(), text.encode(), why, _TEXT) != _CONF_OK:
                self._c.rd_kafka_conf_destroy(conf)
                raise _exception(_INVALID, _text(why.value))
        self._c.rd_kafka_conf_set_dr_msg_cb(conf, self._callbacks[0])
        self._c.rd_kafka_conf_set_error_cb(conf, self._callbacks[1])
        made: int | None = self._c.rd_kafka_new(_PRODUCER, conf, why, _TEXT)
        if made is None:
            self._c.rd_kafka_conf_destroy(conf)
            raise _exception(_INVALID, _text(why.value))
        return made

    def __del__(self) -> None:
        """Destroy the handle; what it has not sent is gone."""
        if getattr(self, "_handle", None):
            for topic in self._topics.values():
                self._c.rd_kafka_topic_destroy(topic)
            self._c.rd_kafka_destroy(self._handle)
            self._handle = None

    # --- errors ------------------------------------------------------------------------------------------------------

    def _refused(self, code: int) -> Exception:
        """Return the error for a record that was not taken; if the handle is broken for good, why it is."""
        why = ctypes.create_string_buffer(_TEXT)
        fatal = self._c.rd_kafka_fatal_error(self._handle, why, _TEXT)
        return _exception(fatal, _text(why.value), fatal=True) if fatal else _exception(code)

    def _settle(self, error: int | None) -> None:
        """Raise what a call for transactions has returned."""
        if error is None:
            return
        found = _exception(
            self._c.rd_kafka_error_code(error),
            _text(self._c.rd_kafka_error_string(error)),
            fatal=bool(self._c.rd_kafka_error_is_fatal(error)),
            retriable=bool(self._c.rd_kafka_error_is_retriable(error)),
            txn_requires_abort=bool(self._c.rd_kafka_error_txn_requires_abort(error)),
        )
        self._c.rd_kafka_error_destroy(error)
        raise found

    def connect(self, seconds: float) -> None:
        """Wait until a broker has answered; no topic is asked for, so none is created by it."""
        found = _P()
        if code := self._c.rd_kafka_metadata(self._handle, 0, None, ctypes.byref(found), _milliseconds(seconds)):
            raise _exception(code)
        self._c.rd_kafka_metadata_destroy(found)

    # --- transactions ------------------------------------------------------------------------------------------------

    def init_transactions(self, seconds: float) -> None:
        """Fence the producers of this transactional id before this one."""
        self._settle(self._c.rd_kafka_init_transactions(self._handle, _milliseconds(seconds)))

    def begin_transaction(self) -> None:
        """Begin a transaction."""
        self._settle(self._c.rd_kafka_begin_transaction(self._handle))

    def commit_transaction(self, seconds: float) -> None:
        """Commit it."""
        self._settle(self._c.rd_kafka_commit_transaction(self._handle, _milliseconds(seconds)))

    def abort_transaction(self, seconds: float) -> None:
        """Abort it."""
        self._settle(self._c.rd_kafka_abort_transaction(self._handle, _milliseconds(seconds)))

    def purge(self) -> None:
        """Forget what was not sent yet."""
        self._c.rd_kafka_purge(self._handle, _PURGE_ALL)

    def poll(self, seconds: float) -> int:
        """Let the library tell what it has to tell."""
        return int(self._c.rd_kafka_poll(self._handle, _milliseconds(seconds)))

    def flush(self, seconds: float) -> int:
        """Wait until everything is sent; return how many records are left."""
        self._c.rd_kafka_flush(self._handle, _milliseconds(seconds))
        return len(self)

    def __len__(self) -> int:
        """Return how many records wait to be sent or acknowledged."""
        return int(self._c.rd_kafka_outq_len(self._handle))

    # --- records -----------------------------------------------------------------------------------------------------

    def _topic(self, name: str) -> int:
        if name not in self._topics:
            made = self._c.rd_kafka_topic_new(self._handle, name.encode(), None)
            if made is None:
                raise self._refused(self._c.rd_kafka_last_error())
            self._topics[name] = made
        return self._topics[name]

    def produce(self, topic: str, value: bytes | None, key: bytes | None, partition: int) -> None:
        """Send one record to a partition."""
        sizes = [len(part or b"") for part in (value, key)]
        where = self._topic(topic)
        if self._c.rd_kafka_produce(where, partition, _COPY, value, sizes[0], key, sizes[1], None):
            raise self._refused(self._c.rd_kafka_last_error())

    def produce_columns(self, topic: str, batch: pa.RecordBatch, columns: RecordColumns) -> int:
        """Send the records of a batch, in their order; return how many were taken before the client was full."""
        import numpy as np

        made = np.zeros(batch.num_rows, np.dtype(_Message))
        _lay(made, "payload", "len", batch[columns.staged_value])
        if columns.key:
            _lay(made, "key", "key_len", batch[columns.key])
        where, address = self._topic(topic), made.ctypes.data
        if self._c.rd_kafka_produce_batch(where, _ANY_PARTITION, _COPY, address, len(made)) == len(made):
            return len(made)
        errors = made["err"]
        taken = int(np.argmax(errors != 0))
        if (errors[taken:] == _FULL).all():  # nothing after the first was taken: their order stays
            return taken
        raise self._refused(int(errors[errors != 0][0]))


def _callbacks(on_delivery: Callable[[Any, Any], None], on_error: Callable[[Any], None]) -> tuple[Any, Any]:
    """Return what the library calls in `poll`, `flush` and `commit`, in the thread that calls those."""

    def delivered(_handle: int, message: int, _opaque: int) -> None:
        if code := _Message.from_address(message).err:
            on_delivery(_error(code), None)

    def failed(_handle: int, code: int, reason: bytes, _opaque: int) -> None:
        on_error(_error(code, _text(reason)))

    return _Delivered(delivered), _Errors(failed)


def _error(code: int, reason: str | None = None, **flags: bool) -> Any:  # noqa: ANN401 - a KafkaError
    from confluent_kafka import KafkaError

    return KafkaError(code, reason, **flags) if reason else KafkaError(code, **flags)


def _exception(code: int, reason: str | None = None, **flags: bool) -> Exception:
    from confluent_kafka import KafkaException

    made: Exception = KafkaException(_error(code, reason, **flags))
    return made


def _lay(made: Any, address: str, size: str, column: pa.Array) -> None:  # noqa: ANN401 - an array of numpy
    """Write where the bytes of each value are, and how many; a null has no address."""
    import numpy as np
    import pyarrow as pa

    column = column.cast(pa.binary())
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    made[size] = np.diff(ends)
    made[address] = ends[:-1]
    made[address] += np.uint64(content.address if content and content.size else ctypes.addressof(_EMPTY))
    if column.null_count:
        absent = column.is_null().to_numpy(zero_copy_only=False)
        made[size][absent] = 0
        made[address][absent] = 0


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _text(content: bytes | None) -> str:
    return (content or b"").decode(errors="replace")
