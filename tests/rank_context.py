"""A rank's context, of the parts that a test has."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.frames import Address
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.optimizer_state import OptimizerState
from spare_megatron.state.rank_context import RankContext, RankProgress
from spare_megatron.store import keys


def rank_context(
    member: Member = Member(GroupId(0)),  # noqa: B008
    *,
    config: Any = None,
    run_dir: Path = Path(),
    agreement: Any = None,
    servers: Mapping[Member, Address | Sequence[Address]] | None = None,
    head: int = 0,
    **parts: Any,
) -> RankContext:
    """That of rank 0 of the group, whose peers have these piece servers, by position if several. What is not given is
    None.
    """
    known: dict[str, Any] = {
        "spec": SimpleNamespace(
            member=member,
            group=member.group,
            incarnation=member.incarnation,
            rank=0,
            name=f"group-{member.group}",
            device="cpu",
            config=config or RunConfig(),
            run_dir=run_dir,
            wiped_out_at_s=None,
            stages=None,
        ),
        "controller": SimpleNamespace(head=head),
        "trainer": SimpleNamespace(slabs=[SimpleNamespace(position=0)]),
        "voting": SimpleNamespace(agreement=agreement),
        "store": SimpleNamespace(wait=lambda key, _timeout_s: addresses[key]),
        "probe": SilentProbe(),
        "progress": RankProgress(),
    }
    addresses = {
        keys.piece_server(other, position): str(address)
        for other, found in (servers or {}).items()
        for position, address in enumerate([found] if isinstance(found, Address) else found)
    }
    names = [field.name for field in fields(RankContext) if field.init]
    ctx = RankContext(**dict.fromkeys(names) | known | parts)  # type: ignore[arg-type]
    ctx.optimizer_state = OptimizerState(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    return ctx
