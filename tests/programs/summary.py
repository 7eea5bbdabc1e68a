"""What came of many programs, as a table and as one line."""

from __future__ import annotations

import collections
import dataclasses
import json
import re

from tests.programs.log import FEATURES
from tests.programs.trials import VERDICTS, Trial

#: The largest share of programs that may be refused. Most of those of the narrow kind hang hooks on what another rank
#: gave, which is drawn more often there than people do it.
MAX_REFUSED = 0.1
#: What may never be.
_FAILURES = ("wrong", "hung", "crashed")


@dataclasses.dataclass
class Summary:
    """What came of many programs."""

    trials: list[Trial]
    most_refused: float = MAX_REFUSED

    def share(self, feature: str) -> float:
        """The share of programs with a feature."""
        return sum(feature in trial.features for trial in self.trials) / len(self.trials)

    def of(self, *verdicts: str) -> list[Trial]:
        """Those with one of some verdicts."""
        return [trial for trial in self.trials if trial.verdict in verdicts]

    @property
    def failures(self) -> list[Trial]:
        """Those that are wrong, hung or crashed."""
        return self.of(*_FAILURES)

    @property
    def crossed(self) -> tuple[float, float]:
        """The shares of programs in which requests, and gradients, crossed ranks."""
        forward, backward = zip(*(trial.crossed for trial in self.trials), strict=True)
        return sum(forward) / len(forward), sum(backward) / len(backward)

    @property
    def passes(self) -> bool:
        """Whether nothing failed and little is refused."""
        return not self.failures and len(self.of("refused")) < self.most_refused * len(self.trials)

    def table(self) -> str:
        """Features and outcomes with their shares."""
        lines = [f"{'feature':<34}{'share':>8}" + "".join(f"{verdict:>9}" for verdict in VERDICTS)]
        layers = sorted({feature for trial in self.trials for feature in trial.features if feature not in FEATURES})
        for feature in ("", *FEATURES, *layers):
            those = [trial for trial in self.trials if not feature or feature in trial.features]
            if not those:
                continue
            counts = [sum(trial.verdict == verdict for trial in those) for verdict in VERDICTS]
            lines.append(
                f"{feature or 'all programs':<34}{len(those) / len(self.trials):>8.1%}"
                + "".join(f"{count:>9}" for count in counts)
            )
        forward, backward = self.crossed
        lines.append(f"requests crossed ranks in {forward:.1%} of the programs, gradients in {backward:.1%}")
        refusals = collections.Counter(_kind_of(trial.why) for trial in self.of("refused"))
        lines += [f"{count:6} refused: {why}" for why, count in refusals.most_common(20)]
        lines += [f"seed {trial.seed} is {trial.verdict}: {trial.why[:200]!r}" for trial in self.failures[:20]]
        return "\n".join(lines)

    def as_json(self) -> str:
        """The outcome on one line."""
        counts = {verdict: len(self.of(verdict)) for verdict in VERDICTS}
        return json.dumps({"programs": len(self.trials), **counts})


def _kind_of(why: str) -> str:
    """A refusal's text without names and numbers."""
    return re.sub(r"'[^']*'|\d+", "_", why)[:150]
