"""What a subtask does in a block: the epochs that it runs before it hears of the others (stale-synchronous).

Within a block a subtask has its own feedback in the epoch after. What it feeds back to others waits for the end of the
block, and what they feed back for the next one: so in blocks of k + 1 epochs none is more than k ahead of the slowest,
nobody waits inside of one, and what comes out does not depend on time. A bulk-synchronous round is a block of one epoch
(Flink paper, 5.3). Knows the turns of a subtask; not where records and state are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from dagster_unified.operators.rounds.sending import Sent
from dagster_unified.operators.rounds.spec import EVERYWHERE, Level, everywhere_but
from dagster_unified.operators.rounds.task import Inbox, Outcome, Turn, take_turn


@dataclass(frozen=True)
class Block:
    """How many epochs a block has, and the records that come again in each of them."""

    epochs: int = 1
    replayed: Inbox = field(default_factory=dict)
    ends_with_criteria: bool = False
    """Whether it ends with an epoch in which the criteria have no record, which is the same one in all subtasks."""


def take_block(first: Turn, block: Block, afresh: Callable[[], Level]) -> Outcome:
    """Runs a block in one subtask; `afresh` gives functions of its own to each epoch after the first."""
    whole, turn = Outcome(epochs=0), first
    while True:
        out = take_turn(turn)
        whole.epochs += 1
        whole.sent += out.sent
        whole.criteria = out.criteria
        whole.metrics.add(out.metrics)
        if whole.epochs == block.epochs or (block.ends_with_criteria and not out.criteria):
            whole.fed_back += out.fed_back
            whole.feedback += out.feedback
            return whole
        own, others = _apart(turn, out.fed_back)
        whole.fed_back += others
        whole.feedback += sum(sent.batch.num_rows for sent in others)
        inbox = {slot: list(records) for slot, records in block.replayed.items()}
        for sent in own:
            inbox.setdefault(sent.slot, []).append((sent.target, sent.batch))
        turn = replace(turn, level=afresh(), epoch=turn.epoch + 1, inbox=inbox)


def _apart(turn: Turn, fed_back: Iterable[Sent]) -> tuple[list[Sent], list[Sent]]:
    """What was fed back to the subtask itself, and what to others."""
    own: list[Sent] = []
    others: list[Sent] = []
    number = turn.subtask.number
    for sent in fed_back:
        if turn.level.is_for(number, sent.slot, sent.target):
            own.append(sent)
            if sent.target == EVERYWHERE and turn.level.subtasks > 1:
                others.append(sent._replace(target=everywhere_but(number)))
        else:
            others.append(sent)
    return own, others
