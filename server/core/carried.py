"""Whose rows one member may bring: those of sessions that it names, in its group and with its key.

A session is a secret of its member, so whoever names it was given it. All else is as if each member had spoken itself.
"""

from server.core.registry import Registry, SessionRecord
from server.membership.contributor import Contributor
from statsd_bn.errors import AuthenticationRefused, ProtocolError
from statsd_bn.messages import Carried

# Members that share a host are the same in every round, so what is found out about them is kept; thousands of hosts.
_MOST_KEPT = 4096


def company(carried: Carried, speaker: SessionRecord, registry: Registry) -> tuple[Contributor, ...]:
    """Members whose rows one of them brings, in the order of the rows; nobody if one of them is not known here.

    That one is to say who it is, and all of them speak for themselves if they get no answer.

    Raises:
        ProtocolError: a session is of another group than the speaker's, or the speaker's is not among them.
        AuthenticationRefused: a session is another key's.
    """
    if carried.session not in carried.tokens:
        raise ProtocolError("sessions: expected the speaker's among them, got only those of others")
    kept = registry.companies.get(carried.sessions)
    if kept is not None:
        return kept
    found = [registry.sessions.get(token) for token in carried.tokens]
    known = [record for record in found if record]
    if len(known) < len(found):
        return ()
    if any(record.master is not speaker.master for record in known):
        raise ProtocolError(f"sessions: expected those of {speaker.master.membership.name}, got one of another group")
    if any(record.key != speaker.key for record in known):
        raise AuthenticationRefused(
            "authentication refused: a session whose rows another one brings is another key's", reason="foreign session"
        )
    if len(registry.companies) >= _MOST_KEPT:
        registry.companies.clear()
    members = registry.companies[carried.sessions] = tuple(record.contributor for record in known)
    return members
