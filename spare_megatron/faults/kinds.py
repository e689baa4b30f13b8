"""The registry of faults: a row for each kind, whose handler is in the process that it strikes."""

from dataclasses import dataclass, replace
from typing import Literal

from spare_megatron.faults.points import FaultKind, FaultPoint

Costs = Literal["nothing", "departure", "maybe", "group", "node", "run"]
"""What a fault that lasts takes away: no group, a group that leaves in order, its group if it is noticed, its group for
sure, all groups of its node, the run.
"""

Need = Literal["isolated_nodes", "embedded_store", "further_groups", "one_machine"]
"""What a run must have or be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What settings, checks and draws have to know of a kind; `docs/campaigns.md` describes its effect."""

    strikes: Literal["rank", "device", "group", "node", "host", "store"] = "rank"
    """`device` is the memory or the arithmetic of a rank."""
    costs: Costs = "nothing"
    duration: Literal["lasts", "passes", "either"] = "either"
    """Whether it lasts for good, passes after `seconds`, which are then needed, or either."""
    needs: tuple[Need, ...] = ()
    phases: tuple[FaultPoint, ...] = ()
    """Those at which it can strike; empty for all."""
    target: str = ""
    """What it strikes at these phases and at no other."""
    drawn: Literal["survived", "listed", "never"] = "survived"
    """Whether random faults are of this kind: wherever the run survives it, only if it is listed, or never."""
    flips: Literal["", "sum", "bucket", "token", "moment", "value", "result"] = ""
    """The number of which it flips a bit; a result is in the precision of the model."""
    in_operations: bool = False
    """Strikes the results of operations of passes, those of `forward` or of `backward` passes."""
    has_factor: bool = False
    """Makes something slower by a factor."""
    corrupts_state: bool = False
    """Is found by comparing the state of groups."""
    in_background: bool = False
    """Can strike a background thread."""

    @property
    def is_sure_to_cost(self) -> bool:
        return self.costs in ("group", "node")


_WHILE_SUMS_GROW = tuple(map(FaultPoint, ("forward", "send", "receive", "backward", "patch", "before_reduce")))
_SUMS = "the local gradient sums, which are no longer read"
_BUCKET = "a bucket that is staged, and none is"
_TOKENS = "the tokens that the first stage reads for a microbatch, not"
_RESULTS = "operations of a pass, and none begins"

_SLOW = Kind(has_factor=True)
_NODE = Kind(strikes="node", costs="node")
_STORE = Kind(strikes="store", needs=("embedded_store", "one_machine"))
_ERROR = Kind(strikes="device", costs="maybe", drawn="never")
_FLIP = replace(_ERROR, duration="lasts", flips="value")
_OUTPUT = replace(_FLIP, flips="result")
_PASSES = (FaultPoint.FORWARD, FaultPoint.BACKWARD)
_RESULT = replace(_OUTPUT, in_operations=True, phases=_PASSES, target=_RESULTS)

_ROWS = {
    "kill": Kind(costs="group", duration="lasts", in_background=True),
    "raise": Kind(costs="group", duration="lasts"),
    "hang": Kind(costs="group"),
    "stop": Kind(costs="group", in_background=True),
    "delay": Kind(costs="maybe", duration="passes"),
    "slow": _SLOW,
    "slow_data": _SLOW,
    "slow_host": replace(_SLOW, strikes="host", drawn="listed"),
    "slow_link": replace(_SLOW, strikes="node", drawn="listed", needs=("isolated_nodes",)),
    "disk_full": Kind(),
    "clock_jump": Kind(duration="passes"),
    "nan": Kind(strikes="device", costs="group", duration="lasts", phases=_WHILE_SUMS_GROW, target=_SUMS),
    "bit_flip": replace(_FLIP, flips="sum", phases=_WHILE_SUMS_GROW, target=_SUMS, drawn="survived"),
    "param_flip": replace(_FLIP, corrupts_state=True, drawn="survived"),
    "moment_flip": replace(_FLIP, corrupts_state=True, flips="moment"),
    "sum_flip": replace(_FLIP, flips="bucket", phases=(FaultPoint.STAGED, FaultPoint.SUMMED), target=_BUCKET),
    "data_flip": replace(_FLIP, flips="token", phases=(FaultPoint.FORWARD,), target=_TOKENS),
    "activation_flip": _OUTPUT,
    "stuck_bit": replace(_OUTPUT, duration="either"),
    "drift": _ERROR,
    "product_flip": _RESULT,
    "product_stuck": replace(_RESULT, duration="either"),
    "product_rare": replace(_RESULT, duration="either"),
    "product_drift": replace(_RESULT, duration="either", flips=""),
    "operation_flip": _RESULT,
    "drain": Kind(strikes="group", costs="departure"),
    "resize": Kind(strikes="group", duration="lasts", needs=("further_groups",)),
    "stop_store": _STORE,
    "kill_store": replace(_STORE, costs="run", duration="lasts"),
    "stop_node": replace(_NODE, needs=("one_machine",)),
    "kill_supervisor": replace(_NODE, duration="lasts"),
    "cut": replace(_NODE, needs=("isolated_nodes", "one_machine")),
}

KINDS: dict[FaultKind, Kind] = {FaultKind(name): kind for name, kind in _ROWS.items()}
"""In the order in which random faults choose among them."""
