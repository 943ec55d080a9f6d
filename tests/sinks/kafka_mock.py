"""librdkafka's own mock cluster, for faults that a real broker makes too rarely; it lives in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PRODUCE = 0
_NAMES = {
    "rd_kafka_conf_new": (ctypes.c_void_p, []),
    "rd_kafka_new": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]),
    "rd_kafka_destroy": (None, [ctypes.c_void_p]),
    "rd_kafka_mock_cluster_new": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
    "rd_kafka_mock_cluster_destroy": (None, [ctypes.c_void_p]),
    "rd_kafka_mock_cluster_bootstraps": (ctypes.c_char_p, [ctypes.c_void_p]),
    "rd_kafka_mock_topic_create": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    ),
    "rd_kafka_mock_broker_set_down": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
    "rd_kafka_mock_broker_set_up": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
    "rd_kafka_mock_push_request_errors_array": (
        None,
        [ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)],
    ),
}


class MockCluster:
    """One broker that fails as told. Error numbers are those of the protocol."""

    def __init__(self, library: ctypes.CDLL, cluster: int) -> None:
        self._library = library
        self._cluster = cluster
        self.servers = library.rd_kafka_mock_cluster_bootstraps(cluster).decode()

    def create(self, topic: str, partitions: int = 1) -> None:
        """Create a topic."""
        self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)

    def fail_next(self, errors: Sequence[int]) -> None:
        """Answer the next produce requests with these errors, one each, 0 lets one pass."""
        array = (ctypes.c_int * len(errors))(*errors)
        self._library.rd_kafka_mock_push_request_errors_array(self._cluster, PRODUCE, len(errors), array)

    def go_down(self) -> None:
        """Close every connection and take none."""
        self._library.rd_kafka_mock_broker_set_down(self._cluster, 1)

    def come_up(self) -> None:
        """Take connections again."""
        self._library.rd_kafka_mock_broker_set_up(self._cluster, 1)


@contextmanager
def mock_cluster() -> Iterator[MockCluster]:
    """Give a cluster of one broker."""
    import confluent_kafka

    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    library = ctypes.CDLL(str(next(folder.glob("librdkafka-*.so*"))))
    for name, (result, arguments) in _NAMES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    client = library.rd_kafka_new(0, library.rd_kafka_conf_new(), ctypes.create_string_buffer(512), 512)
    cluster = library.rd_kafka_mock_cluster_new(client, 1)
    try:
        yield MockCluster(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(client)
