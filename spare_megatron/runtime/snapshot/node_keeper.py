"""The keeper of a node, as its supervisor sees it: started, and started again when it is gone."""

import os
import secrets
from multiprocessing.context import BaseContext

from spare_megatron.runtime.process.processes import Child, end_child, start_child
from spare_megatron.runtime.process.spec import NodeSpec
from spare_megatron.runtime.snapshot.keeper import keep
from spare_megatron.runtime.wire.keeper_wire import KeeperAddress


class NodeKeeper:
    """The process. What one held is gone with it; the next begins with nothing, at the same address.

    Args:
        spec: The node.
        context: What processes are started with.
    """

    def __init__(self, spec: NodeSpec, context: BaseContext) -> None:
        self._spec = spec
        self._context = context
        self._child: Child | None = None
        # Abstract: the name is free again when the process has ended, however it did.
        self.address = KeeperAddress(name=f"\0spare-keeper-{secrets.token_hex(16)}", key=secrets.token_bytes(32))

    def look(self) -> None:
        """Sees to it that there is one."""
        if self._child is not None and self._child.process.is_alive():
            return
        self.end()
        name = f"keeper-{self._spec.node}"
        self._child = start_child(self._context, name, keep, self.address, self._spec.run_dir, name, os.getpid())

    def end(self) -> None:
        """Kills and reaps it."""
        if self._child is not None:
            end_child(self._child)
            self._child = None
