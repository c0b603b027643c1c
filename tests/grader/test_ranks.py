"""The trusted side of a group of ranks: what it hears from a rank that has ended."""

import selectors
import socket

from grader.ranks import _Group, _Peer


def test_the_end_of_a_connection_is_heard_twice_in_one_batch_of_events_without_harm():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        group = object.__new__(_Group)
        group._selector = selectors.DefaultSelector()
        peer = _Peer(0, ours, {})
        ours.setblocking(False)
        group._selector.register(ours, selectors.EVENT_READ, peer)
        theirs.close()
        group._drain(peer)  # the warden has reported that the rank ended
        group._hear(peer)  # the event of its connection was in the same batch
        assert peer.eof_at is not None
        assert not group._selector.get_map()
