"""The order in which layers are used: announced by the caller, or learned from the last forward."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from diptych.plans.offload import Use, expected_uses, next_backwards, next_layers


class UseOrder:
    """A record of past uses and a forecast of the next uses.

    Args:
        num_prefetch_layers: number of layers that a window contains after the current one.
    """

    def __init__(self, num_prefetch_layers: int) -> None:
        self.layers: list[int] = []
        """Registered layers in the order of forward."""
        self.training = True
        """True if backward follows forward."""
        self._num_prefetch_layers = num_prefetch_layers
        self._pass: list[int] = []
        self._expected: deque[Use] = deque()
        self._last: Use | None = None
        self.pending: list[int] = []
        """Layers whose backward waits for a replay; it begins or continues when it reads a parameter."""
        self._replays: dict[int, tuple[int, ...]] = {}
        """By layer, the layers that the last step replayed before the layer's backward."""
        self._replayed: list[int] = []
        self.current = Use("S", -1)
        """The use that began last; its microbatch is known if uses were announced."""

    def expects_replay(self, layer_id: int) -> bool:
        """Return True if a replay comes before a layer's backward, as announced or as in the last step."""
        if self._expected:
            return self._expected[0].kind == "R"
        return layer_id in self._replays and not self._replayed

    def add(self, layer_id: int) -> None:
        """Add a registered layer, ordered by its number until a forward has another order."""
        self.layers = sorted([*self.layers, layer_id])

    def expect(self, uses: Iterable[Use]) -> None:
        """Announce the next uses."""
        self._expected = deque(uses)

    def begin(self, use: Use) -> tuple[int, ...]:
        """Begin a use and return the window: the layers to fetch, in the order in which they are needed."""
        self._last = self.current = use
        self._learn_replays(use)
        if not self._expected:
            self._learn(use)
        else:
            self.current = expected = self._expected.popleft()
            if expected[:2] != use[:2]:
                self._expected.clear()
                self.current = use
        return self._window(chain([use], self._upcoming()))

    def next_backwards(self, with_current: bool = False) -> tuple[Use, ...]:
        """Return the forwards whose backwards come next, as many as a window contains.

        Args:
            with_current: include the current use.
        """
        uses = chain([self.current] if with_current else [], islice(self._upcoming(), 4096))
        return next_backwards(uses, self._num_prefetch_layers + 1)

    def next_window(self) -> tuple[int, ...]:
        """Return the window of the uses after the last one."""
        return self._window(self._upcoming())

    def _upcoming(self) -> Iterator[Use]:
        last = self._expected[-1] if self._expected else self._last
        if last is None or last.layer not in self.layers:
            last = Use("S", self.layers[-1])
        replays = self._replays
        if last.kind == "R" and self.pending and self.pending[-1] not in replays:
            begin, end = (self.layers.index(layer) for layer in (last.layer, self.pending[-1]))
            replays = {**replays, self.pending[-1]: tuple(self.layers[begin:end]) or (last.layer,)}
        return chain(self._expected, expected_uses(self.layers, last, self.training, replays))

    def _window(self, uses: Iterable[Use]) -> tuple[int, ...]:
        return next_layers(uses, min(self._num_prefetch_layers + 1, len(self.layers)))

    def _learn_replays(self, use: Use) -> None:
        """Record which layers are replayed before which backward."""
        if use.kind == "R":
            self._replayed.append(use.layer)
            return
        if use.kind == "B":
            self._replays.pop(use.layer, None)
            if self._replayed:
                self._replays[use.layer] = tuple(dict.fromkeys(self._replayed))
        self._replayed = []

    def _learn(self, use: Use) -> None:
        """Record the order of the layers in forward."""
        if use.kind == "F" and use.layer not in self._pass:
            self._pass.append(use.layer)
            return
        if len(self._pass) > 1:
            self.layers = self._pass + [number for number in self.layers if number not in self._pass]
        self._pass = [use.layer] if use.kind == "F" else []
