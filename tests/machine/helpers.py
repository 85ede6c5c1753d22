"""What tests of measurements share."""

from types import SimpleNamespace


class Program(SimpleNamespace):
    """What a compiled program is to a benchmark: `run`, and 42 bytes of memory."""

    def __call__(self, *arguments):
        return self.run(*arguments)

    def memory_analysis(self):
        return SimpleNamespace(argument_size_in_bytes=30, output_size_in_bytes=20, alias_size_in_bytes=15,
                               temp_size_in_bytes=7)  # fmt: skip

    def as_text(self):
        return self.text
