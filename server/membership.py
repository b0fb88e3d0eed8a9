"""Who belongs to a group, since when, until when.

A group is strict: it opens when `world_size` members have registered and is broken as soon as one leaves it
after that. A broken group answers everything with the reason; the first member of a new run replaces it.
"""

from dataclasses import dataclass

from statsd_bn.errors import DuplicateMember, RegistrationRefused, ReplicaLost, WorldSizeMismatch
from statsd_bn.messages import WORLD, Register


@dataclass(slots=True)
class Slave:
    """A registered contributor, seen from the master.

    Attributes:
        session: the life of the process that registered.
        member: its number in the job.
        deadline: how long its rounds may stay open, in seconds.
        place: where it runs, for people.
        peer: whom to answer.
        step: the step it is in.
        has_past: whether it had taken part in a round when it registered, with an earlier life of the server.
        replicas: rows in its latest contribution; 0 before the first.
        since: when it registered first.
        threads: how many rounds it has had under way at once, at most: so many threads of it exchange.
    """

    session: bytes
    member: int
    deadline: float
    place: str
    peer: bytes
    step: int
    has_past: bool = False
    replicas: int = 0
    since: float = 0.0
    threads: int = 1

    def __str__(self) -> str:
        return f"member {self.member} ({self.place})"


class Membership:
    """The slaves of one life of a group.

    Args:
        job: the job's name.
        group: the group's name.
        world_size: how many members make it complete.
    """

    def __init__(self, job: str, group: str, world_size: int) -> None:
        self.job = job
        self.group = group
        self.world_size = world_size
        self.slaves: dict[int, Slave] = {}
        self.is_open = False
        self.lost: ReplicaLost | None = None
        self.banished: set[bytes] = set()

    @property
    def missing(self) -> int:
        """How many members the group still waits for before it opens."""
        return 0 if self.is_open else self.world_size - len(self.slaves)

    @property
    def present(self) -> list[int]:
        """The members that are registered, in order."""
        return sorted(self.slaves)

    def admit(self, register: Register, peer: bytes) -> Slave:
        """Takes a member in, or finds it again.

        Raises:
            ReplicaLost: the group is broken.
            WorldSizeMismatch: the member expects another number of members, or is one too many.
            RegistrationRefused: some members are far into a run that others have not begun.
            DuplicateMember: another process is this member already.
        """
        if self.lost:
            raise self.lost
        self._check_size(register)
        self._check_past(register)
        slave = self.slaves.get(register.member)
        if slave is None:
            self._check_room(register)
            slave = Slave(
                register.session,
                register.member,
                register.deadline,
                register.place,
                peer,
                register.step,
                register.has_past,
            )
            self.slaves[register.member] = slave
        elif slave.session != register.session:
            raise DuplicateMember(
                f"job {self.job!r}, group {self.group!r} already has a member {register.member}: "
                f"{slave.place} is registered, {register.place} was refused. Give every process its own RANK, "
                "or every run its own job name",
                job=self.job,
                group=self.group,
                member=register.member,
                place=slave.place,
            )
        slave.peer = peer
        self.is_open = self.is_open or len(self.slaves) == self.world_size
        return slave

    def remove(self, slave: Slave, cause: str) -> None:
        """Takes a member out that said goodbye; an open group is broken by it."""
        self._take_out(slave, f"failed with {cause}" if cause else "left while others went on", cause)

    def banish(self, slave: Slave, cause: str) -> None:
        """Takes a member out that is lost without a goodbye; if it comes back to a broken group, it is told so."""
        self._take_out(slave, f"was lost: {cause}", cause)
        if self.lost:
            self.banished.add(slave.session)

    def _take_out(self, slave: Slave, reason: str, cause: str) -> None:
        del self.slaves[slave.member]
        if self.is_open and not self.lost:
            self.lost = ReplicaLost(
                f"job {self.job!r}, group {self.group!r}, step {slave.step}: {slave} {reason}",
                job=self.job,
                group=self.group,
                member=slave.member,
                step=slave.step,
                cause=cause,
            )

    def _check_size(self, register: Register) -> None:
        if register.world_size != self.world_size:
            raise self._mismatch(
                register,
                f"expected world_size {self.world_size}, as members {self.present} have it, got {register.world_size}",
                register.world_size,
            )

    def _check_past(self, register: Register) -> None:
        """After a restart of the master its members tell it how far they are; a newcomer cannot be among them."""
        others = [slave for slave in self.slaves.values() if slave.session != register.session]
        for slave in others:
            older, newer = (slave, register) if slave.step else (register, slave)
            if older.step and not newer.step and not newer.has_past:
                raise RegistrationRefused(
                    f"job {self.job!r}, group {self.group!r}: member {older.member} ({older.place}) is at step "
                    f"{older.step}, and member {newer.member} ({newer.place}) has taken part in no round; all members "
                    "of a strict group begin together. Begin a new run, with a later epoch or another job name"
                )

    def _check_room(self, register: Register) -> None:
        number = register.member
        if self.group == WORLD and number >= self.world_size:
            raise self._mismatch(
                register,
                f"expected a number in [0, {self.world_size}), as members {self.present} have it, got {number}",
                number + 1,
            )
        if len(self.slaves) == self.world_size:
            raise self._mismatch(
                register,
                f"expected {self.world_size} members, and {self.present} are there, got one more",
                self.world_size + 1,
            )

    def _mismatch(self, register: Register, reason: str, got: int) -> WorldSizeMismatch:
        return WorldSizeMismatch(
            f"job {self.job!r}, group {self.group!r}: {reason} from member {register.member} ({register.place})",
            job=self.job,
            group=self.group,
            member=register.member,
            expected=self.world_size,
            got=got,
        )
