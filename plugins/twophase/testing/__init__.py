"""Does a sink keep its promises? `SinkContract` finds out, with processes that are killed, stopped and woken.

    class TestMySink(SinkContract):
        @pytest.fixture
        def sink(self):
            return MySink("orders", conn_id="warehouse")       # over a system with nothing in it

        @pytest.fixture
        def read(self, sink):
            return lambda: [...]                               # the rows that a reader finds: dicts of id and word

The sink has to be in a module that can be imported, for a process of its own builds it again from its declaration: what
a sink only remembers is gone by then, as after any crash.
"""

from twophase.testing.contract import SinkContract
from twophase.testing.outputs import Read, Rows, Stage, Staged

__all__ = ["Read", "Rows", "SinkContract", "Stage", "Staged"]
