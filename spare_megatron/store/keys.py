"""The keys of a run in the control store: one function or constant for each, with who writes and who reads it.

No other module spells a key. etcd puts the prefix of the run before each; the embedded store holds one run only.
"""

from spare_megatron.stacking.layout import GroupId, Member

# ----------------------------------------------------------------------------------------------------------- the run

RUN_NAME = "name"
"""Name of the run. Written by the driver; for people who list the keys of an etcd."""

ALL_GROUPS_READY = "all_groups_ready"
"""Exists once every group is ready to train, or lost. Written by the last reporter; read by ranks, supervisors."""

NUM_READY_REPORTS = "num_ready_reports"
"""Counter of the reports of ready groups, repeated ones included. Counted and read by each reporter."""

DATA_DIGEST = "data-digest"
"""Digest of samples of the shared corpus. Written by the first rank that has read them; read by all others."""

AUDITED_DEVICE = "audited-device"
"""Model of device that a run with audits computes on. Written by the first rank; read by all others."""

PLAIN_WORLD = "plain"
"""Name of the only torch.distributed world of a run without SPARe, for all of its ranks."""


def ready(group: GroupId) -> str:
    """Set when the group is ready or lost. Written by its leader, a supervisor or the driver; read by reporters."""
    return f"ready/{group}"


def ready_report(group: GroupId, reporter: str) -> str:
    """One reporter's report that the group is ready or lost. Written by it; only counted, in `NUM_READY_REPORTS`."""
    return f"ready_report/{group}/{reporter}"


# ----------------------------------------------------------------------------------------------------------- the log

LOG = "log/"
"""The directory that holds the entries and nothing else; they are written in lexicographic order."""


def entry(index: int) -> str:
    """Entry of the decision log. Written once, by any leader, supervisor or the driver; read by all of them."""
    return f"{LOG}{index:010}"


def broken(index: int) -> str:
    """Why the collective preceding entry `index` has failed. Written by any of its ranks; read by the others."""
    return f"broken/{index}"


def votes(attempt: int, writer: Member) -> str:
    """Votes on an attempt that this leader has cast, its own and those it relays. Read by the leader that decides."""
    return f"vote/{attempt}/{writer.group}/{writer.incarnation}"


def num_votes(attempt: int) -> str:
    """Counter of the votes on an attempt, repeated casts included. Counted and read by the leaders that cast them."""
    return f"votes/{attempt}"


def relay(member: Member) -> str:
    """Address and token of the member's relay. Written by its leader; read by the leaders of its block."""
    return f"relay/{member.group}/{member.incarnation}"


def waiting(group: GroupId) -> str:
    """Incarnation that waits to be admitted. Written by the group's leader; read by the leader that commits."""
    return f"waiting/{group}"


def restart(group: GroupId) -> str:
    """Incarnation that has restarted after a wipe-out, and the state it offers. Written and read by all leaders."""
    return f"restart/{group}"


def site_start(num_restarts: int) -> str:
    """Unique name of a start of this run as a site. Written by the first leader that speaks; read by later ones."""
    return f"site-start/{num_restarts}"


def round_result(attempt: int) -> str:
    """How a round with other sites has ended. Written by the leader that speaks; read by those of other groups."""
    return f"round/{attempt}"


def digest(index: int, group: GroupId) -> str:
    """Digest of the group's parameters as of entry `index`. Written by its leader; read by an admitted group's."""
    return f"digest/{index}/{group}"


# ------------------------------------------------------------------------------------------------------- supervisors


def beat(node: int) -> str:
    """Heartbeat of the node's supervisor, which writes it; read by the supervisors that watch the node."""
    return f"beat/{node}"


def supervisor_incarnation(node: int) -> str:
    """Incarnation of the node's present supervisor, if not the first. Written by it; for people."""
    return f"life/{node}"


def group_incarnation(group: GroupId) -> str:
    """Present incarnation of the group, if not the first. Written by its supervisors; read by all and the driver."""
    return f"incarnation/{group}"


def group_stages(member: Member) -> str:
    """Stages of the incarnation, where groups may have fewer than usual. Written by the first supervisor to start it;
    read by all of its group.
    """
    return f"stages/{member.group}/{member.incarnation}"


def assignment(index: int) -> str:
    """Entry of the list of assignments. Written once, by the supervisor that assigns; read by those without ranks."""
    return f"assignment/{index:010}"


def last_beat(node: int) -> str:
    """The heartbeat at which the node was found silent. Written by its watchers; read by those who re-form groups."""
    return f"silent/{node}"


def given_up(machine: int) -> str:
    """Says that the machine gets no place. Written by its supervisor; read by those who re-form groups."""
    return f"given_up/{machine}"


def examination(machine: int) -> str:
    """The last examination of a machine in quarantine, or of one that replaces it: its number and the machines that do
    the same. Written by its supervisor; read by those of the others.
    """
    return f"examination/{machine}"


def examined(machine: int, number: int, by: int) -> str:
    """What the machine `by` has found in this examination. Written by it; read by the supervisor of the examined."""
    return f"examined/{machine}/{number}/{by}"


def exchanged(machine: int, number: int, by: int) -> str:
    """What the machine `by` writes and reads to see how fast its link is, and removes."""
    return f"exchanged/{machine}/{number}/{by}"


def part_ready(member: Member, node: int) -> str:
    """Says that the node can start its ranks of this incarnation. Written and read by the group's supervisors."""
    return f"part/{member.group}/{member.incarnation}/{node}"


def has_left(member: Member, node: int) -> str:
    """Says that the member has left the run, and its ranks on the node have ended. Written and read by supervisors."""
    return f"left/{member.group}/{member.incarnation}/{node}"


def part_fenced(member: Member) -> str:
    """Entry, rank and cause of the fence of this incarnation. Written and read by the group's supervisors."""
    return f"lost/{member.group}/{member.incarnation}"


# ------------------------------------------------------------------------------------------- servers and communicators


def piece_server(member: Member, rank: int) -> str:
    """Address of the rank's piece server. Written by the rank; read by the same rank of groups that copy state."""
    return f"pieces/{member.group}/{member.incarnation}/{rank}"


def snapshot_server(member: Member, rank: int) -> str:
    """Address of the rank's snapshot server, and its copies. Written by the rank; read by the same rank of others."""
    return f"keeper/{member.group}/{member.incarnation}/{rank}"


def world(member: Member) -> str:
    """Name of the torch.distributed world of a group's ranks, which all of them join."""
    return f"world/{member.group}/{member.incarnation}"


def communicator(index: int, position: int) -> str:
    """Name of the communicator across groups of one rank position, built at a log index; its ranks join it."""
    return f"communicator/{index}/{position}"


# ------------------------------------------------------------------------------------------------------- checkpoints


def save_begun(index: int) -> str:
    """Says that the folder of the save is there. Written by the saving group's leader; read by all others."""
    return f"save/{index}/begun"


def save_over(index: int) -> str:
    """Says that the save has ended, well or not. Written by the saving group's leader; read by all others."""
    return f"save/{index}/over"


def save_shares(index: int, member: Member) -> str:
    """State partitions that the member has written for the save. Written by its leader; read by the saving group."""
    return f"save/{index}/{member.group}/{member.incarnation}"


# ------------------------------------------------------------------------------------------ sites, in the outer store


OUTER_SETTINGS = "settings"
"""What all sites must have alike. Written once, by the leader of the first site; read by all others."""


def site_incarnation(site: int, incarnation: int) -> str:
    """The start of a site's run that has this incarnation. Written once, by the site's leader, which also reads it."""
    return f"site/{site}/{incarnation}"


def lease(site: int) -> str:
    """Shows that the site lives. Written again and again by its leader; read by those of all sites."""
    return f"lease/{site}"


def speaker(site: int) -> str:
    """Addresses at which the site serves its differences. Written by its leader; read by those of other sites."""
    return f"speaker/{site}"


def arrival(number: int, site: int, incarnation: int) -> str:
    """The site's vote on an open round. Written once, by its leader; read by those of all sites."""
    return f"arrival/{number}/{site}/{incarnation}"


def done(number: int, attempt: int, site: int, incarnation: int) -> str:
    """The site's vote on a closed round. Written once, by its leader; read by those of all sites."""
    return f"done/{number}/{attempt}/{site}/{incarnation}"
