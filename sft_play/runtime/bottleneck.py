"""What holds a run back: the loader, the network or one slow rank; said once, with the setting to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median_low

from sft_play.config.schema import Config
from sft_play.runtime.meter import PARTS, slowest_of

# Logged steps that are looked at together, the first one (warm-up) left out, and the shares that are too much.
WINDOW = 10
DATA_SHARE = 0.2
WAIT_SHARE = 0.3
SLOW_TIMES = 1.3

Row = Mapping[str, float]


class Bottleneck:
    """Looks at the latest logged steps until it has found something.

    Args:
        waits: whether the wait for other ranks is known; without, neither the network nor a slow rank can be told.

    Attributes:
        text: what was found; None as long as nothing was.
    """

    def __init__(self, config: Config, *, waits: bool) -> None:
        self._config, self._waits = config, waits
        self._window: deque[list[dict[str, float]]] = deque(maxlen=WINDOW)
        self._throttled: set[int] = set()
        self._logged = 0
        self.text: str | None = None

    def look(self, ranks: Sequence[Row], throttled: Sequence[float], names: Sequence[str]) -> str | None:
        """Take in a logged step; returns what was found, the first time.

        Args:
            ranks: each rank's sums of the interval.
            throttled: whether each device's clock was lowered.
            names: of the devices.
        """
        self._logged += 1
        self._throttled |= {number for number, one in enumerate(throttled) if one}
        if self.text is not None or self._logged == 1:
            return None
        kept = ("steps", "step", *PARTS)
        self._window.append([{name: one[name] for name in kept} for one in ranks])
        if len(self._window) == WINDOW:
            self.text = self._found(names)
        return self.text

    def _found(self, names: Sequence[str]) -> str | None:
        ranks = [
            {name: sum(interval[rank][name] for interval in self._window) for name in own}
            for rank, own in enumerate(self._window[0])
        ]
        slowest = slowest_of(ranks)
        if not slowest["step"]:
            return None
        data, wait = slowest["data"] / slowest["step"], slowest["wait"] / slowest["step"]
        if data > DATA_SHARE:
            return f"the loader holds the run back: {data:.0%} of each step waits for data; {self._data_setting()}"
        if not self._waits or len(ranks) == 1:
            return None
        computes = [one["compute"] for one in ranks]
        times = max(computes) / max(median_low(computes), 1e-9)
        if times > SLOW_TIMES:
            return self._slow(computes.index(max(computes)), times, names)
        if wait > WAIT_SHARE:
            what = f"the network holds the run back: {wait:.0%} of each step waits for the exchange of gradients"
            return f"{what}; a larger train.grad_accum or train.batch_size exchanges less often"
        return None

    def _data_setting(self) -> str:
        config = self._config
        if config.data.streaming:
            return "set train.dataloader_prefetch_factor higher, or prepare the rows (data.streaming: false)"
        workers = config.train.dataloader_num_workers
        return f"set train.dataloader_num_workers to {max(2, 2 * workers)} (now {workers})"

    def _slow(self, rank: int, times: float, names: Sequence[str]) -> str:
        name = names[rank] if rank < len(names) else f"device {rank}"
        throttled = rank in self._throttled
        cause = "its clock was lowered (heat or power): see its cooling" if throttled else "see what else runs there"
        return (
            f"rank {rank} holds the run back: {name} computes {times:.1f} times as long as the others; "
            f"{cause}, or leave it out with dist.gpus"
        )
