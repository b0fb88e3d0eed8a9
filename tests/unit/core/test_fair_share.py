"""Fair share: while several ask, whoever takes the most waits; nobody waits for ever."""

from server.limits import fair_share
from server.limits.account import Account
from server.limits.fair_share import FairShare


class Play:
    """A server whose clock only work moves on."""

    def __init__(self, most: int = 2**30) -> None:
        self.now = 0.0
        self.account = Account(most, most)
        self.shares: FairShare[str] = FairShare(self.account)
        self.taken: list[str] = []

    def come(self, payer: str, peer: str, name: str, seconds: float = 0.0001, size: int = 100) -> bool:
        """A frame comes; returns whether it was taken at once."""
        if not self.shares.may_go(self.now, payer, peer.encode()):
            self.shares.wait(self.now, payer, peer.encode(), size, name)
            return False
        self.take(payer, name, seconds)
        return True

    def take(self, payer: str, name: str, seconds: float) -> None:
        self.now += seconds
        self.taken.append(name)
        self.shares.took(payer, seconds)

    def take_waiting(self, seconds: float = 0.0001) -> bool:
        if turn := self.shares.next(self.now):
            self.take(*turn, seconds)
        return turn is not None

    def make_greedy(self, payer: str = "greedy", peer: str = "g") -> None:
        """A payer takes more than its share beside another, and all that it may take on credit."""
        self.come("small", "s", "s")
        for _ in range(2):
            assert self.come(payer, peer, "first", 0.02)
            self.come("small", "s", "s")
        self.taken.clear()


def test_whoever_is_alone_is_never_held_up():
    play = Play()
    assert all(play.come("job", "peer", "frame", 0.005) for _ in range(1000))
    assert not play.shares.waiting


def test_equals_are_never_held_up():
    play = Play()
    assert all(play.come(f"job {number % 4}", "peer", "frame", 0.0005) for number in range(4000))


def test_who_asks_for_little_goes_at_once_beside_a_flood_of_large_work():
    """The flood always has a frame of 5 ms at hand, and the small job one of 0.1 ms after each 0.3 ms."""
    play = Play()
    small: list[float] = []
    while play.now < 5.0:
        asked = play.now
        assert play.come("small", "s", "small"), "held up"
        small.append(play.now - asked)
        play.come("flood", "f", "flood", 0.005)
        if not play.take_waiting(0.005):
            play.now += 0.0002
    flood = play.taken.count("flood")
    assert flood * 0.005 / play.now < 0.75
    assert flood * 0.005 / play.now > 0.5, "it has its share"
    assert len(small) > 1000


def test_what_waits_has_its_turn_although_others_never_rest():
    play = Play()
    play.make_greedy()
    play.come("greedy", "g", "waits", 0.005)
    assert play.shares.waiting
    for _ in range(2000):
        play.come("small", "s", "s")
        if play.shares.is_due(play.now):
            play.take_waiting()
        if "waits" in play.taken:
            break
    assert play.taken.index("waits") < 1000


def test_few_frames_are_taken_before_one_that_waits_and_has_credit():
    play = Play()
    play.make_greedy()
    play.come("greedy", "g", "waits")
    play.now += 0.05
    count = 0
    while not play.shares.is_due(play.now):
        play.come("small", "s", "s")
        count += 1
    assert count <= fair_share.TAKEN_BETWEEN < fair_share.READS_BETWEEN


def test_when_nobody_else_asks_any_more_all_that_waits_is_taken():
    play = Play()
    play.make_greedy()
    for number in range(20):
        play.come("greedy", "g", str(number), 0.02)
    play.now += 2 * fair_share.WINDOW_SECONDS
    while play.take_waiting(0.005):
        pass
    assert play.taken == [str(number) for number in range(20)]
    assert play.account.held == 0
    assert not play.shares.waiting


def test_payers_and_their_peers_take_turns_and_each_keeps_its_order():
    play = Play()
    play.make_greedy("one", "a")
    play.now += 0.03
    play.make_greedy("other", "z")
    for peer, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1")):
        play.shares.wait(play.now, "one", peer.encode(), 10, name)
    play.shares.wait(play.now, "other", b"z", 10, "z1")
    for _ in range(5):
        play.now += 0.01
        assert play.take_waiting()
    assert play.taken == ["a1", "z1", "b1", "a2", "a3"]


def test_only_so_many_frames_of_a_connection_wait():
    play = Play()
    play.make_greedy("greedy", "first")
    for number in range(2 * fair_share.PEER_FRAMES):
        play.shares.wait(play.now, "greedy", b"first", 10, str(number))
    assert play.shares.dropped == fair_share.PEER_FRAMES
    play.shares.wait(play.now, "greedy", b"other", 10, "another's")
    assert play.shares.dropped == fair_share.PEER_FRAMES


def test_large_frames_leave_room_for_small_ones():
    play = Play()
    play.make_greedy()
    for number in range(200):
        play.shares.wait(play.now, "greedy", b"%d" % number, 2**20, "large")
    assert play.account.held <= fair_share.PAYER_BYTES * 3 // 4
    dropped = play.shares.dropped
    assert dropped > 100
    play.shares.wait(play.now, "greedy", b"small", fair_share.SMALL_BYTES // 2, "small")
    assert play.shares.dropped == dropped


def test_what_waits_counts_in_the_account_and_a_full_one_takes_no_more():
    play = Play(most=10_000)
    play.make_greedy()
    for _ in range(20):
        play.shares.wait(play.now, "greedy", b"g", 1000, "frame")
    assert 5_000 < play.account.of("greedy") <= 10_000
    assert play.shares.dropped > 10


def test_what_has_waited_too_long_is_dropped():
    play = Play()
    play.make_greedy()
    play.shares.wait(play.now, "greedy", b"g", 10, "old")
    play.now += fair_share.MOST_WAIT_SECONDS + 0.01
    play.shares.wait(play.now, "greedy", b"g", 10, "new")
    assert play.take_waiting()
    assert (play.taken, play.shares.dropped) == (["new"], 1)


def test_who_took_much_a_while_ago_has_as_much_right_as_anybody():
    play = Play()
    play.make_greedy()
    assert not play.come("greedy", "other", "frame")
    play.now += 3 * fair_share.WINDOW_SECONDS
    assert play.come("small", "s", "s")
    assert play.come("greedy", "third", "frame")
