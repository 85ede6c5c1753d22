"""Where the time of a training step goes, by part: from a profiler trace, beside what the compiled program predicts."""
