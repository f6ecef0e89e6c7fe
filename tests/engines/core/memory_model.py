"""What blocks and slots hold, as token ids: a step must find all that came before its rows, whoever wrote it."""

from dataclasses import dataclass, field

from tests.engines.core.desk import truth_of

BLOCK = 16


@dataclass
class MemoryModel:
    rows: dict[int, int] = field(default_factory=dict)  # block * BLOCK + offset -> token
    states: dict[int, list[int]] = field(default_factory=dict)  # slot -> the tokens it was made from

    def place(self, blocks, slot, tokens) -> None:
        """Bytes arrive from outside: a hit, or a hand-off."""
        for position, token in enumerate(tokens):
            self.rows[blocks[position // BLOCK] * BLOCK + position % BLOCK] = token
        self.states[slot] = list(tokens)

    def copy(self, plan) -> None:
        """The copies of a plan, which come before its forward."""
        for source, target in plan.clone_blocks:
            for offset in range(BLOCK):
                if source * BLOCK + offset in self.rows:
                    self.rows[target * BLOCK + offset] = self.rows[source * BLOCK + offset]
        for source, target in plan.clone_slots:
            self.states[target] = list(self.states.get(source, ()))

    def compute(self, item, start: int, ids) -> None:
        """Rows of one item: everything before them is there, and they are written."""
        sequence, table = item.sequence, item.block_table
        if not sequence.is_finished:
            before = [truth_of(item, position) for position in range(start)]
            found = [self.rows.get(table[p // BLOCK] * BLOCK + p % BLOCK) for p in range(start)]
            assert found == before, f"{item.request_id}: blocks {list(table)} hold {found}, not {before}"
            state = self.states.get(item.slot, [])[:start]
            assert state == before, f"{item.request_id}: slot {item.slot} holds {state}, not {before}"
        for position, token in enumerate(ids, start):
            self.rows[table[position // BLOCK] * BLOCK + position % BLOCK] = token
        self.states[item.slot] = [*self.states.get(item.slot, [])[:start], *ids]
