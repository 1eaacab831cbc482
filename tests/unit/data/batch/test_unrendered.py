"""Whether a template writes a key of a message, where it refuses some of the chats that are compared."""

import pytest

from distill_rl.data.batch.unrendered import _message_changes


def template(whole, alone, length):
    """A template that writes the same for a chat with the key, and for one without it as said: True: another text, False: the
    same one, None: it refuses the chat."""

    def write(messages, **options):
        if messages[0].get("name") == "n":
            return "text"
        changes = whole if len(messages) == length else alone
        if changes is None:
            raise ValueError("refused")
        return "other" if changes else "text"

    return write


@pytest.mark.parametrize(
    ("whole", "alone", "written"),
    [
        (True, False, True),
        (True, None, True),
        (False, True, True),
        (None, True, True),
        (None, None, True),  # refused without the key, so it was read
        (None, False, False),
        (False, None, False),
        (False, False, False),
    ],
)
def test_key_before_the_last_message_counts_by_either_text(whole, alone, written):
    chat = [{"role": "user", "content": "a", "name": "n"}, {"role": "assistant", "content": "b"}]
    assert _message_changes(template(whole, alone, 2), chat, 0, "name", "text") is written


@pytest.mark.parametrize(("whole", "written"), [(True, True), (None, True), (False, False)])
def test_key_of_the_last_message_counts_by_the_whole_text(whole, written):
    chat = [{"role": "user", "content": "a", "name": "n"}]
    assert _message_changes(template(whole, None, 1), chat, 0, "name", "text") is written
