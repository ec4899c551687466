"""Sessions: conversations that the server keeps between the turns of /v1/chat/interactive."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from allspark.pipeline.conversation import Conversation
from allspark.serve.choice import Choice
from allspark.serve.errors import ApiError, invalid_value

# Ids that the server gives are above those that clients think of, and exact as numbers of JSON.
_FIRST_OWN_ID = 1 << 52
MAX_ID = (1 << 53) - 1

# The API key's digest, and the id: a key does not reach another's sessions.
Key = tuple[bytes, int]


@dataclass
class Session:
    """A conversation with a model, and the turn of it that runs."""

    key: Key
    model: str
    conversation: Conversation = field(default_factory=Conversation)
    num_bytes: int = 0
    last_use: float = 0.0  # of the clock, in seconds
    is_busy: bool = False
    is_cancelled: bool = False  # the turn that runs
    _choice: Choice | None = None

    @property
    def id(self) -> int:
        """What the client calls it."""
        return self.key[1]

    def runs(self, choice: Choice) -> None:
        """The turn's output was started; it ends at once if the turn was cancelled before."""
        self._choice = choice
        if self.is_cancelled:
            choice.stop()

    def cancel(self) -> None:
        """Ends the turn that runs, if one does, with what it has."""
        self.is_cancelled = self.is_busy
        if self._choice is not None:
            self._choice.stop()


class Sessions:
    """The sessions of a server. Used on the event loop alone.

    Those that were not used for longest go where there are too many, or where all together are too
    large. A session whose turn runs stays.

    Args:
        max_sessions, max_bytes, timeout_s: the bounds; 0: none.
        clock: gives seconds.
    """

    def __init__(
        self,
        max_sessions: int,
        max_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._clock = clock
        # By last use, oldest first.
        self._sessions: OrderedDict[Key, Session] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return self._num_bytes

    def find(self, owner: bytes, session_id: int) -> Session | None:
        """A session that is kept."""
        self._expire()
        return self._sessions.get((owner, session_id))

    def begin_turn(
        self, owner: bytes, session_id: int | None, model: str, keep: bool
    ) -> Session:
        """The session of a turn that begins; a new one where none is kept. Its turn must end.

        Args:
            session_id: None: one that nobody has.
            keep: whether it is to be kept. One without an id that is not is not counted, either.

        Raises:
            ApiError: another turn of it runs, it is of another model, or there is no room.
        """
        if session_id is None:
            session_id = _FIRST_OWN_ID + secrets.randbelow(_FIRST_OWN_ID)
            if not keep:
                return Session((owner, session_id), model, is_busy=True)
        session = self.find(owner, session_id)
        if session is None:
            self._make_room()
            session = Session((owner, session_id), model)
            self._sessions[session.key] = session
        elif session.is_busy:
            message = f"session_id is {session_id}, whose last turn still runs; cancel ends it"
            raise ApiError(409, message, param="session_id", code="session_busy")
        elif session.model != model:
            message = (
                f"session_id is {session_id}, a session of the model {session.model!r}; model is "
                f"{model!r}"
            )
            raise invalid_value(message, "model")
        session.is_busy = True
        return session

    def end_turn(self, session: Session, num_bytes: int, keep: bool) -> None:
        """A turn has ended; the session, which is so large now, is kept or forgotten."""
        if self._sessions.get(session.key) is not session:
            return
        session.is_busy = session.is_cancelled = False
        session._choice = None
        self._num_bytes += num_bytes - session.num_bytes
        session.num_bytes = num_bytes
        session.last_use = self._clock()
        self._sessions.move_to_end(session.key)
        if not keep or (self._max_bytes and num_bytes > self._max_bytes):
            self._drop(session)
            return
        while self._max_bytes and self._num_bytes > self._max_bytes and self._drop_oldest():
            pass

    def _make_room(self) -> None:
        bound = self._max_sessions
        if bound and len(self._sessions) >= bound and not self._drop_oldest():
            message = f"{len(self._sessions)} sessions have turns that run; the bound is {bound}"
            raise ApiError(429, message, param="session_id", code="too_many_sessions")

    def _drop_oldest(self) -> bool:
        """Forgets the idle session that was not used for longest; False if there is none."""
        oldest = next((each for each in self._sessions.values() if not each.is_busy), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _expire(self) -> None:
        if not self._timeout_s:
            return
        end = self._clock() - self._timeout_s
        for session in list(self._sessions.values()):
            if session.is_busy:
                continue
            if session.last_use > end:
                return
            self._drop(session)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.key]
        self._num_bytes -= session.num_bytes
