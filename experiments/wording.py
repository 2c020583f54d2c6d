"""Translation of library errors into the words of a configuration: fields to set instead of arguments to give."""

from collections.abc import Iterator
from contextlib import contextmanager

FIELDS = {
    'MemoryPolicy(moments="host")': "hardware.memory.moments=host",
    "MemoryPolicy(checkpoint_blocks=True)": "hardware.memory.checkpoint_blocks=true",
    "MemoryPolicy(checkpoint_blocks=False)": "hardware.memory.checkpoint_blocks=false",
    "MemoryPolicy(halve_batches=True)": "hardware.memory.halve_batches=true",
    "the task has not one whole batch to train on: lower its batch_size": "the task has not one whole batch to train "
    "on: lower task.{profile}.batch_size",
    "the batch size": "task.{profile}.batch_size",
    "Set root to": "Set task.{profile}.root to",
    "root must hold": "task.{profile}.root must hold",
    'evaluation_text="wiki.test.raw"': "task.{profile}.evaluation_text=wiki.test.raw",
    "(for results, for the cache, TMPDIR for temporary files)": "(results=, TMPDIR for temporary files)",
}


@contextmanager
def in_fields(profile: str) -> Iterator[None]:
    """Reword errors within the block: fields of the configuration instead of arguments of the library."""
    try:
        yield
    except Exception as error:
        arguments = [worded(part, profile) if isinstance(part, str) else part for part in error.args]
        if arguments == list(error.args):
            raise
        raise type(error)(*arguments) from error


def worded(text: str, profile: str) -> str:
    for words, field in FIELDS.items():
        text = text.replace(words, field.format(profile=profile))
    return text
