import pytest

from distill_rl.transport.base import Slot
from distill_rl.workers.pipeline.sub_batch import SlotLedger


def test_slot_is_reused_with_the_next_even_generation():
    ledger = SlotLedger(2)
    first = ledger.take(2)
    assert [slot.index for slot in first] == [0, 1]
    ledger.give_back(first[1:])
    ledger.give_back(first[:1])
    assert ledger.take(2) == (Slot(1, 6), Slot(0, 6))


def test_more_slots_than_are_free_are_refused():
    ledger = SlotLedger(3)
    ledger.take(2)
    with pytest.raises(RuntimeError, match="2 slots of 3 were asked for; 1 are free"):
        ledger.take(2)
    assert (ledger.free, ledger.held) == (1, 2)


def test_occupancy_is_the_peak_since_the_last_call():
    ledger = SlotLedger(4)
    ledger.give_back(ledger.take(3))
    kept = ledger.take(1)
    assert ledger.occupancy() == 0.75
    assert ledger.occupancy() == 0.25
    ledger.give_back(kept)
    assert ledger.occupancy() == 0.25
    assert ledger.occupancy() == 0.0
