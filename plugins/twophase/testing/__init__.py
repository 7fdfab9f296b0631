"""`SinkContract`, tests of what a sink promises, for users' own sinks: with processes that are killed and stopped.

    class TestMySink(SinkContract):
        @pytest.fixture
        def sink(self):
            return MySink("orders", conn_id="warehouse")       # over a system with nothing in it

        @pytest.fixture
        def read(self, sink):
            return lambda: [...]                               # the rows that a reader finds: dicts of id and word

The sink has to be in a module that can be imported: another process builds it again from its declaration. So whatever a
sink only has in memory is lost, as after a crash.
"""

from twophase.testing.contract import SinkContract
from twophase.testing.outputs import Read, Rows, Stage, Staged

__all__ = ["Read", "Rows", "SinkContract", "Stage", "Staged"]
