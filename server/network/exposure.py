"""Exposure: the warning about an endpoint without keys that others than this user can reach."""

from statsd_bn.reach import Reach, reach

WHAT_THEY_CAN_DO = "join any job, take a rank before its process does, end the job, and read and falsify its statistics"
WHAT_TO_DO = {
    Reach.HOST: "Leave out --bind for a server that only this user can reach, or give --curve DIR",
    Reach.NETWORK: "Close the network to strangers, or give --curve DIR in place of --insecure",
}
WHO = {Reach.HOST: "every user of this host", Reach.NETWORK: "whoever reaches it over the network"}


def warning(endpoint: str) -> str:
    """Warning that says who can reach an endpoint without keys, and what they can do; "" if only this user can."""
    who = reach(endpoint)
    if who is Reach.USER:
        return ""
    return f"{endpoint} is open, without authentication: {WHO[who]} can {WHAT_THEY_CAN_DO}. {WHAT_TO_DO[who]}"
